"""Data sets of the Hugging Face hub, through the `datasets` library: `org/name[@revision][/config][:split]`.

Asked for only when there is no such file. They are read from the library's cache, memory-mapped.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from plaudit.data.in_memory import rows_file
from plaudit.data.rows import Rows
from plaudit.errors import DataError, did_you_mean, install_extra
from plaudit.files import fingerprint, text_digest
from plaudit.hub import SUFFIXES, find_problem, looks_local

NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/([\w.-]+))?(?::([\w.-]+))?")


@dataclass(frozen=True)
class HubDataset:
    """A data set by name, with a default for a split that is not given."""

    name: str
    repository: str
    revision: str | None
    config: str | None
    split: str | None

    def rows(self) -> Rows:
        return Rows(self.name, self._split().with_format("arrow")[:])

    def fingerprint(self) -> str:
        """A digest of the rows, so that a new revision with the same rows is the same data set."""
        split = self._split()
        if not split.cache_files:  # in memory: HF_DATASETS_IN_MEMORY_MAX_SIZE
            return rows_file(split, self.name, self.name).digest
        return text_digest(" ".join(fingerprint(Path(file["filename"])) for file in split.cache_files))

    def num_bytes(self) -> int:
        return sum(Path(file["filename"]).stat().st_size for file in self._split().cache_files)

    def _split(self) -> Any:
        splits = _load(self.repository, self.revision, self.config)
        split = self.split or (next(iter(splits)) if len(splits) == 1 else None)
        if split is None:
            examples = ", ".join(f"{self.name}:{name}" for name in splits)
            raise DataError(f"{self.name} has several splits; name one: {examples}")
        if split not in splits:
            found = ", ".join(splits)
            raise DataError(f"{self.name}: there is no split {split}; there are {found}.{did_you_mean(split, splits)}")
        return splits[split]


def parse_hub_name(name: str, default_split: str | None = None) -> HubDataset | None:
    """A data set's name; None if `name` can only be a path."""
    found = NAME.fullmatch(name)
    if found is None or looks_local(found[1]) or name.lower().endswith(SUFFIXES):
        return None
    return HubDataset(name, found[1], found[2], found[3], found[4] or default_split)


@cache
def _load(repository: str, revision: str | None, config: str | None) -> Any:
    """All splits, downloaded or from the cache. Looked up once per process, so that a run reads one revision throughout."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"there is no file {repository} here; to read data sets from the Hugging Face hub: {install_extra('hub')}"
        ) from None
    problem = find_problem(repository, "dataset", revision)
    try:
        with _without_network(datasets, problem is not None):
            splits: Any = datasets.load_dataset(repository, config, revision=revision)
        if problem is not None and revision not in (None, "main"):
            _require_cached_revision(splits, repository, revision, problem)
        return splits
    except DataError:
        raise
    except Exception as error:  # of HTTP, fsspec, Arrow, and of the library's own
        if problem is not None:
            raise DataError(f"there is no file {repository} here, and {problem}") from None
        reason = " ".join(str(error).split("Example of usage")[0].split())[:300]
        hint = f" A config is named after a slash: {repository}/CONFIG:SPLIT." if "onfig" in reason else ""
        raise DataError(f"{repository}: the data set could not be loaded from the Hugging Face hub: {reason}{hint}") from None


def _require_cached_revision(splits: Any, repository: str, revision: str, problem: str) -> None:
    """Without the hub, the library takes whichever revision is in its cache, in a folder named after the commit. Which commit a tag
    stands for is known to the hub alone."""
    cached = {Path(file["filename"]).parent.name for split in splits.values() for file in split.cache_files}
    if cached != {revision}:
        found = f", which has {' and '.join(f'{repository}@{commit}' for commit in sorted(cached))}" if cached else ""
        raise DataError(f"there is no file {repository} here, and {problem}; revision {revision} is not in the cache{found}")


@contextmanager
def _without_network(datasets: Any, unreachable: bool) -> Iterator[None]:
    """The library uses its cache at once if it knows that it is offline, and otherwise only after a minute of retries."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or unreachable
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
