"""Tokenised rows of large data files, kept for the next start.

An entry is a folder of memory-mapped arrays (token_store.py), named by a digest of everything that its tokens depend on: the
content of the data files, the tokenizer, the chat template, the settings, and the code. So an entry is never out of date: after a
change it is not found again. Beyond a size limit, the least recently used ones are removed.

    $PLAUDIT_CACHE      the folder; default: plaudit in $XDG_CACHE_HOME, or ~/.cache/plaudit
    $PLAUDIT_CACHE_GB   its size limit in GB; default: 50; 0 keeps nothing

An entry is written next to its place and renamed, so an interrupted start leaves none. Its checksums are verified before use.
"""

import hashlib
import importlib.metadata as metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from plaudit.data.conversations import Source
from plaudit.data.token_store import COLUMNS, TokenStore, TokenWriter, checksum, map_store
from plaudit.errors import RecipeError
from plaudit.files import fingerprint, text_digest, try_lock

if TYPE_CHECKING:
    from plaudit.data.templates import ChatTemplate

DEFAULT_GB = 50.0
LOCKED_WITHIN_S = 600.0
"""A folder to build in that has no lock after this time was left by a killed process."""
MIN_BYTES = 8 << 20
"""Data files smaller than this are tokenised in seconds, so they are not kept."""
LIBRARIES = ("tokenizers", "transformers", "jinja2", "pyarrow")
NO_INPUTS = ("name_or_path", "chat_template")
"""Arguments of a tokenizer that tokens do not depend on: its folder, and the template it came with, which may not be used."""
Counts = dict[str, int]
Build = Callable[[TokenWriter], Counts]
"""Tokenises every row into a writer; returns what is to be reported about the rows."""


def build_in_memory(build: Build) -> tuple[TokenStore, Counts]:
    writer = TokenWriter()
    counts = build(writer)
    return writer.in_memory(), counts


@dataclass(frozen=True)
class TokenCache:
    """Where tokenised rows are kept. `inputs`: what they depend on besides the data files and the settings."""

    inputs: Sequence[str]
    report: Callable[[str], object]
    folder: Path = field(default_factory=lambda: cache_folder() / "rows")
    max_bytes: int = field(default_factory=lambda: cache_limit())

    def load(self, sources: Sequence[Source], settings: dict[str, Any], build: Build) -> tuple[TokenStore, Counts]:
        """The rows of these files: from the cache, or built."""
        if not self.max_bytes or sum(source.num_bytes() for source in sources) < MIN_BYTES:
            return build_in_memory(build)
        entry = self.folder / self._key(sources, settings)
        known = self._open(entry)
        if known is not None:
            return known
        try:
            building, lock, writer = self._start(entry)
        except OSError as error:
            self._report_memory_only(error)
            return build_in_memory(build)
        with lock:
            return self._build(entry, building, writer, build, lambda: self._key(sources, settings) == entry.name)

    def _key(self, sources: Sequence[Source], settings: dict[str, Any]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        files = [(source.fingerprint(), repr(source.schema), source.path.suffix) for source in sources]
        versions = [metadata.version(name) for name in LIBRARIES]
        digest.update(json.dumps([files, settings, versions, code_digest(), *self.inputs], sort_keys=True).encode())
        return digest.hexdigest()

    def _open(self, entry: Path) -> tuple[TokenStore, Counts] | None:
        if not entry.is_dir():
            return None
        try:
            about = json.loads((entry / "about.json").read_bytes())
            damaged = next((name for name in COLUMNS if checksum(entry / name) != about["checksums"][name]), None)
            if damaged is None:
                os.utime(entry / "about.json")  # the least recently used entry is removed first
                return map_store(entry), {str(name): int(value) for name, value in about["counts"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
            damaged = str(error)
        self.report(f"{entry}: these tokenised rows are damaged ({damaged}); tokenising again")
        shutil.rmtree(entry, ignore_errors=True)
        return None

    def _start(self, entry: Path) -> tuple[Path, IO[bytes], TokenWriter]:
        """A folder to build the entry in, its lock, which shows others that it is in use, and a writer for its files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        building = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=self.folder))
        try:
            with ExitStack() as on_error:
                lock = on_error.enter_context((building / "unlocked").open("wb"))
                try_lock(lock)  # before it has its name, so that no other process can lock it first
                (building / "unlocked").rename(building / "lock")
                writer = TokenWriter(building)
                on_error.pop_all()
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        return building, lock, writer

    def _build(
        self, entry: Path, building: Path, writer: TokenWriter, build: Build, unchanged: Callable[[], bool]
    ) -> tuple[TokenStore, Counts]:
        """`unchanged`: whether the data files are still those that the entry is named after."""
        try:
            try:
                counts = build(writer)
                checksums = writer.finish()
            finally:
                writer.close()
            if checksums is None:
                assert writer.disk_error is not None
                self._report_memory_only(writer.disk_error)
                return writer.in_memory(), counts
            store = map_store(building)  # it stays valid when the files are renamed or removed
            with suppress(OSError):  # without an entry, the next start tokenises again
                if not unchanged():
                    return store, counts
                (building / "about.json").write_text(json.dumps({"counts": counts, "checksums": checksums}), encoding="utf-8")
                building.rename(entry)  # fails if another process was faster
                self._keep_within_limit(entry)
            return store, counts
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _report_memory_only(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        self.report(f"{self.folder} cannot be written ({reason}): tokenised rows are in memory, and not kept for the next start")

    def _remove_abandoned(self) -> None:
        """What a killed process was building."""
        for folder in self.folder.glob(".*"):
            with suppress(OSError):  # BlockingIOError: it is still being built
                if _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def _keep_within_limit(self, newest: Path) -> None:
        """Remove the least recently used entries. A process that uses one keeps its mapping of the files."""
        used: list[tuple[float, int, Path]] = []
        for about in self.folder.glob("*/about.json"):
            with suppress(OSError):
                size = sum(file.stat().st_size for file in about.parent.iterdir())
                used.append((about.stat().st_mtime, size, about.parent))
        total = sum(size for _, size, _ in used)
        for _, size, entry in sorted(used):
            if total > self.max_bytes and entry != newest:
                shutil.rmtree(entry, ignore_errors=True)
                total -= size


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = (folder / "lock").open("rb")
    except FileNotFoundError:  # killed before it was locked, if that was some time ago: locking takes no time
        unlocked = {file.name for file in folder.iterdir()} <= {"unlocked"}
        return unlocked and time.time() - folder.stat().st_mtime > LOCKED_WITHIN_S
    with lock:
        return try_lock(lock)


def cache_folder() -> Path:
    if given := os.environ.get("PLAUDIT_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "plaudit"


def cache_limit() -> int:
    """In bytes."""
    given = os.environ.get("PLAUDIT_CACHE_GB") or str(DEFAULT_GB)
    try:
        limit = float(given) * 1e9
        if not 0 <= limit < 1e18:
            raise ValueError
    except ValueError:
        raise RecipeError(f"PLAUDIT_CACHE_GB is {given!r}; it should be a size in GB, such as 50, or 0 to keep nothing") from None
    return int(limit)


def code_digest() -> str:
    """Of the code that turns rows into tokens."""
    here = Path(__file__).parent
    return " ".join(map(fingerprint, [*sorted(here.glob("*.py")), here.parent / "types.py"]))


def template_inputs(template: "ChatTemplate") -> list[str] | None:
    """What tokens depend on in a tokenizer and its chat template; None if that cannot be known."""
    tokenizer: Any = template.tokenizer
    try:
        backend = text_digest(tokenizer.backend_tokenizer.to_str())
    except Exception:  # parts written in Python; Rust raises a bare Exception
        return None
    given = {name: value for name, value in tokenizer.init_kwargs.items() if name not in NO_INPUTS and not name.endswith("_file")}
    about = {
        "special tokens": tokenizer.special_tokens_map,  # variables of the template
        "settings": given | {"split_special_tokens": tokenizer.split_special_tokens},
        "code": [fingerprint(file) for file in _remote_code(tokenizer)],
        "today": date.today().isoformat() if "strftime_now" in template.text else None,
    }
    return [backend, template.text, json.dumps(about, sort_keys=True, default=str)]


def _remote_code(tokenizer: Any) -> list[Path]:
    """The code that a tokenizer comes with, which model.trust_remote_code runs."""
    names = {kind.__module__ for kind in type(tokenizer).__mro__ if not kind.__module__.startswith("transformers.")}
    files = [file for name in names if (file := getattr(sys.modules.get(name), "__file__", None))]
    return sorted({file for own in files for file in Path(own).parent.glob("*.py")})
