"""Ids of rows that have none of their own: the file's name and the row's number."""

import os
from collections.abc import Sequence
from itertools import count

from plaudit.data.conversations import Source


def name_sources(sources: Sequence[Source]) -> list[str]:
    """What the ids of each file's rows begin with: its name, with as many folders as tell it from the other files.

    Sampling depends on ids: the same data in another folder is sampled alike."""
    paths = [os.path.abspath(source.path) for source in sources]

    def is_unique(source: Source, path: str, folders: int) -> bool:
        name = source.name(folders)
        return all(other.name(folders) != name for other, its in zip(sources, paths, strict=True) if its != path)

    return [
        source.name(next(folders for folders in count() if is_unique(source, path, folders)))
        for source, path in zip(sources, paths, strict=True)
    ]
