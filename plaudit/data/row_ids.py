"""Ids of rows that have none of their own: the file's name and the row's number."""

import os
from collections.abc import Sequence
from itertools import count

from plaudit.data.conversations import Source


def name_sources(sources: Sequence[Source], others: Sequence[Source] = ()) -> list[str]:
    """What the ids of each file's rows begin with: its name, with as many folders as tell it from the other files.

    `others`: more files to tell it from, as those for validation. Sampling depends on ids: the same data in another folder is
    sampled alike."""
    every = [(other, os.path.abspath(other.path)) for other in (*sources, *others)]

    def is_unique(source: Source, path: str, folders: int) -> bool:
        name = source.name(folders)
        return all(other.name(folders) != name for other, its in every if its != path)

    return [
        source.name(next(folders for folders in count() if is_unique(source, path, folders)))
        for source, path in every[: len(sources)]
    ]
