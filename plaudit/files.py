"""Atomic writes and content fingerprints.

A reader never sees a partial file or folder: content is written to a hidden sibling, synced, then renamed into place.
"""

import errno
import glob
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from plaudit.hub import model_folder
from plaudit.lora_folder import read_lora_folder


def write_atomic(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. It is renamed to `path` when the block succeeds, and deleted when it raises."""
    temporary = _aside(path)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder to fill. It replaces `final` when the block succeeds, and is deleted when it raises.

    To replace a folder takes two renames. A process that is killed in between leaves the old one as `.NAME.old`, which
    `remove_leftovers` puts back."""
    temporary, old, replaces = _aside(final), _old(final), False
    remove_leftovers(final.parent, [glob.escape(final.name)])
    temporary.mkdir(parents=True)
    try:
        yield temporary
        readable = 0o666 & temporary.stat().st_mode  # as the user's umask says
        for path in temporary.rglob("*"):
            if path.is_file():
                path.chmod(readable)  # safetensors creates files that only their owner can read
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            else:
                _sync_folder(path)
        _sync_folder(temporary)
        if replaces := final.exists():
            final.rename(old)
        temporary.rename(final)
        _sync_folder(final.parent)
    except BaseException:
        if replaces and not final.exists():
            old.rename(final)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if replaces:
        shutil.rmtree(old)


def _aside(path: Path) -> Path:
    """Where something is written before it gets its name."""
    return path.with_name(f".{path.name}.aside")


def _old(folder: Path) -> Path:
    """A folder while another one takes its name."""
    return folder.with_name(f".{folder.name}.old")


@contextmanager
def syncing(files: Iterable[Path]) -> Iterator[None]:
    """Sync files to the disk while the block runs. A disk's error is raised at its end."""

    def sync(file: Path) -> None:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())

    with ThreadPoolExecutor(1) as pool:
        pending = pool.map(sync, files)
        yield
        list(pending)


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Remove what a killed process left for these names (or patterns), and put back a folder that it was about to replace. Others
    stay: a user may own a `.x.old`."""
    for name in names:
        for old in folder.glob(f".{name}.old"):
            final = folder / old.name.removeprefix(".").removesuffix(".old")
            if not os.path.lexists(final):
                old.rename(final)
        for path in [*folder.glob(f".{name}.aside"), *folder.glob(f".{name}.old")]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def is_disk_error(error: BaseException) -> bool:
    """Whether the disk is at fault: full, gone, read-only. (safetensors and tokenizers are Rust: only the message shows it.)"""
    return isinstance(error, OSError) or "(os error " in str(error)


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file for this process until it is closed. A BlockingIOError if another process has locked it; false on a file
    system without locks, as some network file systems are."""
    import fcntl  # Linux and macOS only

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):  # NFS says EACCES
            raise BlockingIOError(*error.args) from None
        return False
    return True


def fingerprint(path: Path) -> str:
    """A digest of the content of a file, or of every file below a folder."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        with file.open("rb") as content:
            while block := content.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def weights_fingerprint(folder: Path) -> str:
    """A quick digest of a model's config and weights: name, size and both ends of each file. Reading all weights takes too long."""
    digest = hashlib.blake2b(digest_size=16)
    lora = read_lora_folder(folder)
    if lora is not None:
        described = b"".join(file.read_bytes() for file in lora.files if file.suffix == ".json")
        digest.update(weights_fingerprint(model_folder(lora.base)).encode() + described)
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(1 << 20))
            content.seek(max(0, size - (1 << 20)))
            digest.update(content.read())
    return digest.hexdigest()


MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""Weights, config, tokenizer, chat template, code."""


def model_fingerprint(path: Path) -> str:
    """A quick digest of everything a model's answers depend on: small files by content, large ones by size, mtime and both ends.

    `path`: a model folder, or one of its files.
    """
    digest = hashlib.blake2b(digest_size=16)
    lora = read_lora_folder(path)
    if lora is not None:
        base = Path(lora.base)
        digest.update((model_fingerprint(base) if base.is_dir() else lora.base).encode())
    for file in sorted({f for name in MODEL_FILES for f in path.glob(name)} if path.is_dir() else {path}):
        stat, end = file.stat(), 1 << 20
        digest.update(f"{file.name if path.is_dir() else ''} {stat.st_size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(end))
            if stat.st_size > end:
                content.seek(max(end, stat.st_size - end))
                digest.update(content.read() + str(stat.st_mtime_ns).encode())
    return digest.hexdigest()


def text_digest(text: str) -> str:
    """A digest of any string, including one with unpaired surrogates, which JSON rows may contain."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that sync files only
            raise
    finally:
        os.close(descriptor)
