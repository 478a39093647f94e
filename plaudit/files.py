"""Writing so that a reader never sees half of anything: aside first, to disk, then renamed into place."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    with atomic_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A file to write; it becomes `path` when the block ends well, and is gone when it does not."""
    aside = path.with_name(f".{path.name}.aside")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A new folder to fill; it becomes `final` when the block ends well, and is gone when it does not."""
    aside = final.with_name(f".{final.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        readable = 0o666 & ~_umask()
        for path in aside.rglob("*"):
            if path.is_file():
                path.chmod(readable)  # safetensors makes files that no server under another name could read
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            else:
                _sync_folder(path)
        _sync_folder(aside)
        if final.exists():
            old = final.with_name(f".{final.name}.old")
            final.rename(old)
            aside.rename(final)
            shutil.rmtree(old)
        else:
            aside.rename(final)
        _sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """What a killed process left aside of these names (or patterns): theirs alone, for a folder may hold its owner's `.x.old`."""
    for name in names:
        for path in [*folder.glob(f".{name}.aside"), *folder.glob(f".{name}.old")]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def is_disk_error(error: BaseException) -> bool:
    """Whether a disk is to blame: full, gone, read-only. (safetensors and tokenizers are Rust, and say so in words alone.)"""
    return isinstance(error, OSError) or "(os error " in str(error)


def fingerprint(path: Path) -> str:
    """Changes when the content of a file, or of any file below a folder, does."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        with file.open("rb") as content:
            while block := content.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def weights_fingerprint(folder: Path) -> str:
    """Changes when a model in a folder does: names, sizes and both ends of each file, for whole weights take too long to read."""
    digest = hashlib.blake2b(digest_size=16)
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
    """Changes when anything does that a model's answers depend on: small files by their content, larger ones by size, time and both
    ends. `path`: a model's folder, or one of its files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted({f for name in MODEL_FILES for f in path.glob(name)} if path.is_dir() else {path}):
        about, end = file.stat(), 1 << 20
        digest.update(f"{file.name if path.is_dir() else ''} {about.st_size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(end))
            if about.st_size > end:
                content.seek(max(end, about.st_size - end))
                digest.update(content.read() + str(about.st_mtime_ns).encode())
    return digest.hexdigest()


def text_digest(text: str) -> str:
    """Of any text: rows may hold half of a surrogate pair."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
