"""Tables and curves of `plaudit eval policy`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plaudit.evaluation.compared import ALL, Part, difference_table
from plaudit.evaluation.results import Cell, Figures, Table, show_cell
from plaudit.statistics.best_of import best_of_n_kl
from plaudit.statistics.intervals import Estimate


def root_kl(k: int) -> float:
    return float(np.sqrt(best_of_n_kl(k)))


def policy_tables(
    gold: str,
    proxies: Sequence[str],
    ks: Sequence[int],
    threshold: float,
    parts: Sequence[Part],
    found: Mapping[str, Figures],
    differences: Mapping[str, Figures],
    details: Mapping[str, Mapping[str, Any]],
) -> list[Table]:
    models = list(found)

    def estimates(part: str, figure: str) -> list[Estimate | None]:
        return [found[name].get(part, {}).get(figure) for name in models]

    def row(part: str, figure: str) -> list[Cell]:
        cells = estimates(part, figure)
        return [show_cell(cell, percent=False) for cell in cells] if is_plain(figure) else list(cells)

    def missing(reward: str) -> list[int]:
        return [details[f"{name}/{reward}"]["without a value"] for name in models]

    def is_malformed(reward: str) -> bool:
        return any(one is not None and one.value > 0 for one in estimates(ALL, f"malformed/{reward}"))

    length = "tokens" if all(estimates(ALL, "tokens")) else "characters"
    known = [figure for k in ks for figure in (f"pass@{k}", f"majority@{k}") if any(estimates(ALL, figure))]
    known.sort(key=lambda figure: figure.startswith("majority"))
    rows: list[tuple[str, Sequence[Cell]]] = [(f"mean {name}", row(ALL, f"reward/{name}")) for name in (gold, *proxies)]
    rows += [(figure, row(ALL, figure)) for figure in known]
    rows += [
        (f"{length} per response", row(ALL, length)),
        ("truncated", row(ALL, "truncated")),
        *((f"malformed, by {x}", row(ALL, f"malformed/{x}")) for x in (gold, *proxies) if x == gold or is_malformed(x)),
        *((f"responses without {x}", missing(x)) for x in (gold, *proxies) if x == gold or any(missing(x))),
    ]
    note = f"A response passes if {gold} gives it at least {threshold:g}. Means and lengths are not in per cent."
    tables = [Table("Policies", models, rows, note=note)]
    shown = [f"reward/{gold}", *(figure for figure in (f"pass@{ks[-1]}", f"majority@{ks[-1]}") if figure in known)]
    for by in dict.fromkeys(part.by for part in parts if part.by):
        inside = [part for part in parts if part.by == by]
        for figure in shown:
            title = f"{_title(figure)}, by {by}"
            tables.append(Table(title, models, [(part.label, row(part.name, figure)) for part in inside], not is_plain(figure)))
    tables += [table for proxy in proxies for table in _best_of_tables(gold, proxy, ks, found)]
    if differences:
        columns = {figure: _title(figure) for figure in (*shown, *([f"pass@{ks[0]}"] if len(ks) > 1 else []), length)}
        tables.append(difference_table("Differences", differences, columns, plain=[name for name in columns if is_plain(name)]))
    return tables


def is_plain(figure: str) -> bool:
    """Not a share, so not in per cent."""
    return figure in ("tokens", "characters") or figure.startswith("reward/")


def _title(figure: str) -> str:
    return f"mean {figure.removeprefix('reward/')}" if figure.startswith("reward/") else figure


def _best_of_tables(gold: str, proxy: str, ks: Sequence[int], found: Mapping[str, Figures]) -> list[Table]:
    """What the response is worth that the proxy likes best of n: to gold, and to the proxy itself."""

    def table(reward: str, figure: str) -> Table:
        rows = [
            (f"{k} (√KL {root_kl(k):.2f})", [own.get(ALL, {}).get(f"{figure}@{k}/{proxy}") for own in found.values()]) for k in ks
        ]
        return Table(f"Best of n by {proxy}: mean {reward}", list(found), rows, percent=False)

    return [table(gold, "best_of"), table(proxy, "proxy")]


def best_of_curves(found: Mapping[str, Figures], rewards: Sequence[str], ks: Sequence[int]) -> dict[str, Any]:
    """The over-optimisation curves: by model and by the reward that chooses, what it gives the best of n, and what gold does."""

    def points(own: Figures, reward: str) -> list[dict[str, Any]]:
        figures = own.get(ALL, {})
        proxy = "proxy" if f"proxy@{ks[0]}/{reward}" in figures else "best_of"  # gold itself
        return [
            {
                "n": k,
                "root_kl": root_kl(k),
                "proxy": figures.get(f"{proxy}@{k}/{reward}"),
                "gold": figures.get(f"best_of@{k}/{reward}"),
            }
            for k in ks
        ]

    return {"best of n": {name: {reward: points(own, reward) for reward in rewards} for name, own in found.items()}}
