"""Several rewards on the same items: figures of every part of the data, and paired differences.

A figure is an array with one value per item, NaN where it does not apply or the reward failed; what is shown is its mean. The
difference between two rewards is that on the items that both have values for.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from plaudit.evaluation.results import Cell, Figures, Table, show_cell
from plaudit.statistics.figures import Resampling, estimate_means

ALL = "all"
"""The part that has all items."""
MOST_DIFFERENCES = 10
"""More rewards than this make: only those against the first."""
DIFFERENCES_NOTE = "Of the items that both have values for; an interval without 0 is a difference that chance does not explain."
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Part:
    """Items that have figures of their own."""

    name: str
    """`all`, or what it is a value of and the value: `data source/gsm8k`."""
    by: str
    """What it is a value of; empty if it has all items."""
    label: str
    items: np.ndarray
    """Their numbers."""


def split_parts(values: Mapping[str, Sequence[str]]) -> list[Part]:
    """All items; and, for each column with several values, those of each value. A column that divides them as one before it does is
    left out."""
    numbers = np.arange(len(next(iter(values.values()))))
    parts, divisions = [Part(ALL, "", ALL, numbers)], list[list[int]]()
    for by, column in values.items():
        names = list(dict.fromkeys(column))
        division = [names.index(value) for value in column]
        if len(names) > 1 and division not in divisions:
            divisions.append(division)
            labels = [name or "(none)" for name in names]
            parts += [Part(f"{by}/{label}", by, label, numbers[np.array(division) == i]) for i, label in enumerate(labels)]
    return parts


def compared(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each with each; of many, each with the first."""
    pairs = list(combinations(names, 2))
    return pairs if len(pairs) <= MOST_DIFFERENCES else [(names[0], name) for name in names[1:]]


def difference_name(first: str, second: str) -> str:
    return f"{first} - {second}"


def prompt_numbers(prompts: Sequence[str]) -> np.ndarray:
    """The number of each item's prompt, from 0: items of one prompt are drawn together."""
    return np.unique(np.array(prompts, dtype=object), return_inverse=True)[1]


Key = tuple[str, str]
"""A reward or a difference, and the figure."""


def estimate_parts(
    parts: Sequence[Part], arrays_of: Callable[[Part], Mapping[str, Arrays]], prompts: np.ndarray, resampling: Resampling
) -> tuple[dict[str, Figures], dict[str, Figures]]:
    """Means of all figures: of each reward, and of the difference between two. Figures without a value are left out.

    `arrays_of` a part: for each reward its figures, of the items of this part. `prompts`: the number of every item's prompt.
    """
    figures, differences = dict[str, Figures](), dict[str, Figures]()
    for part in parts:
        arrays = arrays_of(part)
        values: dict[Key, np.ndarray] = {(name, figure): array for name, own in arrays.items() for figure, array in own.items()}
        for a, b in compared(list(arrays)):
            both = [figure for figure in arrays[a] if figure in arrays[b]]
            values |= {(difference_name(a, b), figure): arrays[a][figure] - arrays[b][figure] for figure in both}
        known = {key: array for key, array in values.items() if not np.isnan(array).all()}
        numbers = np.unique(prompts[part.items], return_inverse=True)[1]  # without gaps
        for (name, figure), estimate in estimate_means(known, numbers, resampling).items():
            results = figures if name in arrays else differences
            results.setdefault(name, {}).setdefault(part.name, {})[figure] = estimate
    return figures, differences


def difference_table(
    title: str, differences: Mapping[str, Figures], columns: Mapping[str, str], plain: Collection[str] = ()
) -> Table:
    """Differences on all items. `columns`: the figures, with their names; those in `plain` are not in per cent."""

    def cell(own: Figures, figure: str) -> Cell:
        found = own.get(ALL, {}).get(figure)
        return show_cell(found, percent=False) if figure in plain else found

    rows = [(name, [cell(own, figure) for figure in columns]) for name, own in differences.items()]
    return Table(title, list(columns.values()), rows, note=DIFFERENCES_NOTE)
