"""What a reward says about an item of a preference benchmark, as figures between 0 and 1.

A reward that scores each response alone sees all of an item's responses once. One that compares (a judge of pairs or of groups) may
favour a position, so it sees everything in both orders: of a pair both; of a prompt with one right answer among many, all of them,
then all of them reversed.

    accuracy          of a pair: 1 if the right response scores higher, 1/2 for a tie; the mean of both orders. Benchmarks that
                      define it differently: `accuracy_of`
    ties              share of comparisons that are ties
    as_given, swapped accuracy in each order
    both_right        right in both orders
    consistency       the same response wins (or none) in both orders
    position_bias     the same position wins in both orders
    first_position    share of verdicts, without ties, for the response that is shown first
    prefers_longer    share of verdicts for the longer response, ties half
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import numpy as np

from plaudit.evaluation.benchmarks import Item
from plaudit.evaluation.rewardbench import TIES, TIES_WEIGHTS, TiedScores, best_of_credit, ties_parts

NAN = float("nan")
ORDERS = ("as_given", "swapped")
RM_BENCH = ("hard", "normal", "easy")


def shown_groups(item: Item, compares: bool) -> list[tuple[int, ...]]:
    """Which of an item's responses are scored together, in which order."""
    everything = tuple(range(len(item.responses)))
    if not compares:
        return [everything]
    if item.benchmark == "rewardbench2" or (item.benchmark == "rmb" and not item.is_pair):
        return [everything, everything[::-1]]
    pairs = [tuple(sorted(pair)) for pair in product(item.right, item.wrong)]
    return [order for pair in pairs for order in (pair, pair[::-1])]


@dataclass(frozen=True)
class Outcome:
    """A reward's values for an item: those of each shown group, in the order in which they were shown."""

    item: Item
    shown: Sequence[tuple[int, ...]]
    values: Sequence[Sequence[float | None]]

    @property
    def failed(self) -> bool:
        return any(value is None for group in self.values for value in group)

    @property
    def in_both_orders(self) -> bool:
        return len(self.shown) > 1

    def scores(self) -> list[np.ndarray]:
        """Values by response, one array per shown group with all responses."""
        return [np.asarray([group[shown.index(i)] for i in range(len(shown))], float) for shown, group in self._groups()]

    def comparisons(self, one: int, other: int) -> list[tuple[float, int]]:
        """For each order in which the two were shown: 1 if the first of them wins, 1/2 for a tie, else 0; and the position that
        wins (0: the one shown earlier; -1: none)."""
        results = []
        for shown, group in self._groups():
            if one in shown and other in shown:
                a, b = group[shown.index(one)], group[shown.index(other)]
                assert a is not None, "failed outcomes are excluded"
                assert b is not None
                winner = -1 if a == b else int((shown.index(one) < shown.index(other)) != (a > b))
                results.append((0.5 if a == b else float(a > b), winner))
        return results

    def _groups(self) -> list[tuple[tuple[int, ...], Sequence[float | None]]]:
        return list(zip(self.shown, self.values, strict=True))


def figures(outcome: Outcome) -> dict[str, float]:
    """All figures of an item; none if the reward failed on it."""
    if outcome.failed:
        return {}
    item = outcome.item
    found = [(pair, outcome.comparisons(*pair)) for pair in product(item.right, item.wrong)]
    results = {"accuracy": accuracy_of(outcome), "ties": fmean(won == 0.5 for _, pair in found for won, _ in pair)}
    if item.benchmark == "rm_bench":
        results |= _rm_bench(found)
    if outcome.in_both_orders:
        results |= _order_figures(found)
    lengths = [len(response) for response in item.responses]
    verdicts = [
        fmean(won if lengths[right] > lengths[wrong] else 1 - won for won, _ in pair)
        for (right, wrong), pair in found
        if lengths[right] != lengths[wrong]
    ]
    if verdicts:
        results["prefers_longer"] = fmean(verdicts)
    return results


def accuracy_of(outcome: Outcome) -> float:
    """Between 0 and 1, by the rule of the item's benchmark."""
    item = outcome.item
    if item.benchmark == "rewardbench2":
        if item.subset == TIES:  # added up by `add_ties`
            return fmean(float(_tied(outcome, order).gap > 0) for order in range(len(outcome.shown)))
        return fmean(best_of_credit(scores, item.right[0]) for scores in outcome.scores())
    if item.benchmark == "rmb" and not item.is_pair:
        # Right if the best response beats all others, in each order in which they were shown.
        wins = [[won == 1.0 for won, _ in outcome.comparisons(item.right[0], wrong)] for wrong in item.wrong]
        return fmean(all(order) for order in zip(*wins, strict=True))
    comparisons = [pair for right, wrong in product(item.right, item.wrong) for pair in outcome.comparisons(right, wrong)]
    if item.benchmark == "judgebench":  # +1 or −1 in each order; right if the sum is positive
        return float(sum(2 * won - 1 for won, _ in comparisons) > 0)
    if item.benchmark == "rm_bench":  # only a higher score counts
        return fmean(won == 1.0 for won, _ in comparisons)
    return fmean(won for won, _ in comparisons)


Compared = tuple[tuple[int, int], list[tuple[float, int]]]


def _order_figures(found: Sequence[Compared]) -> dict[str, float]:
    pairs = [pair for _, pair in found]
    results = {order: fmean(pair[i][0] for pair in pairs) for i, order in enumerate(ORDERS)}
    results["both_right"] = fmean(all(won == 1.0 for won, _ in pair) for pair in pairs)
    results["consistency"] = fmean(len({won for won, _ in pair}) == 1 for pair in pairs)
    results["position_bias"] = fmean(pair[0][1] == pair[1][1] != -1 for pair in pairs)
    winners = [position for pair in pairs for _, position in pair if position != -1]
    if winners:
        results["first_position"] = fmean(position == 0 for position in winners)
    return results


def _rm_bench(found: Sequence[Compared]) -> dict[str, float]:
    """The 3 × 3 matrix chosen_i > rejected_j, of which the style grows with the index: hard is above the diagonal."""
    cells: dict[str, list[float]] = {name: [] for name in RM_BENCH}
    for (right, wrong), pair in found:
        row, column = right, wrong - 3
        name = "hard" if row < column else "normal" if row == column else "easy"
        cells[name].append(fmean(won == 1.0 for won, _ in pair))
    return {name: fmean(values) for name, values in cells.items()}


# RewardBench 2's ties: two items per prompt ------------------------------------------------------------------------------


def tie_key(item: Item) -> tuple[str, str] | None:
    """("ref" or "tied", the number of the prompt), of an item in Ties."""
    if item.benchmark != "rewardbench2" or item.subset != TIES:
        return None
    kind, _, number = item.own_id.partition(":")
    return kind, number


def _tied(outcome: Outcome, order: int) -> TiedScores:
    scores, right = outcome.scores()[order], list(outcome.item.right)
    return TiedScores(scores[right], np.delete(scores, right))


def add_ties(outcomes: Sequence[Outcome], values: Mapping[str, np.ndarray]) -> None:
    """Fill in `ties/…`, the parts of the Ties score: at the `ref` item its own, at the `tied` item those of the prompt."""
    places: dict[str, dict[str, int]] = {}
    for i, outcome in enumerate(outcomes):
        if (key := tie_key(outcome.item)) is not None:
            places.setdefault(key[1], {})[key[0]] = i
    for prompt in places.values():
        scored = {kind: i for kind, i in prompt.items() if not outcomes[i].failed}
        orders = max((len(outcomes[i].shown) for i in scored.values()), default=0)
        by_order = [
            ties_parts(*(_tied(outcomes[scored[kind]], order) if kind in scored else None for kind in ("ref", "tied")))
            for order in range(orders)
        ]
        for name in TIES_WEIGHTS if by_order else ():
            kind = "ref" if name == "ref" else "tied"
            if kind in prompt:
                known = [parts[name] for parts in by_order if not np.isnan(parts[name])]
                values[f"ties/{name}"][prompt[kind]] = np.mean(known) if known else np.nan
