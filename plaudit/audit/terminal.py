"""The report in a terminal: verdict, checks, adversarial probes."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plaudit.audit.checks import EXPLOIT, Check
from plaudit.audit.inspection import Report
from plaudit.redaction import redact

STYLES = {"pass": "green", "fail": "bold red", "not measured": "dim"}
NARROW_NAME = 24
"""Columns for a check's name where there are few."""


def print_report(report: Report, console: Console) -> None:
    numbers = report.numbers
    state = "pass" if report.passed else "fail"
    verdict = "PASSED" if report.passed else "FAILED" if report.failed else "NOTHING MEASURED"
    console.print(Text.assemble((f"{verdict}  ", STYLES[state]), f"{redact(report.title)}: {scope(report)}"))
    console.print(Text(summarise(numbers), style="dim"), "", _checks(report, console.width), "", sep="\n")
    if any(probe["tried"] for probe in numbers["probes"]):
        console.print(Text("Adversarial probes", style="italic"), _probes(report), "", sep="\n")
    console.print(Text("For information: these are no checks", style="italic"))
    lines = Table.grid("", "", padding=(0, 1, 0, 0))
    for line in findings(numbers):
        lines.add_row("·", Text(redact(line)))
    console.print(lines)


def scope(report: Report) -> str:
    """What the verdict is about: how many checks were measured, and which were not."""
    measured = len(report.checks) - len(report.not_measured)
    outcome = (
        f"{len(report.failed)} of {measured} measured checks failed" if report.failed else f"all {measured} measured checks passed"
    )
    probes = [name for name in report.not_measured if name.startswith(EXPLOIT)]
    others = [name for name in report.not_measured if name not in probes]
    missing = [*others, *([f"{len(probes)} adversarial probe{'s' * (len(probes) > 1)}"] if probes else [])]
    return outcome + (f"; not measured: {', '.join(missing)}" if missing else "")


def general_checks(report: Report) -> list[Check]:
    """Every check; of the probes only failed ones, as the rest are in the table of probes."""
    return [check for check in report.checks if check.state == "fail" or not check.name.startswith(EXPLOIT)]


def summarise(numbers: dict[str, Any]) -> str:
    scale, cost = numbers["scale"], numbers["cost"]
    parts = [f"{numbers['responses']:,} responses to {numbers['groups']:,} prompts"]
    if numbers["mean_reward"] is not None:
        parts.append(f"mean reward {shown(numbers['mean_reward'])}, range {shown(scale['low'])} to {shown(scale['high'])}")
    parts.append(f"accepted from {shown(scale['threshold'])}" if scale["threshold"] is not None else "all rewards are the same")
    parts.append(f"{cost['seconds_per_1000']:,.2f} s per 1,000")
    parts += [f"{shown(amount)} {name.replace('_', ' ')} per 1,000" for name, amount in cost["usage_per_1000"].items()]
    return "; ".join(parts)


def _table() -> Table:
    """Two spaces between columns and no frame: in 80 columns the descriptions need the room."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def _checks(report: Report, width: int) -> Table:
    table = _table()
    table.add_column("check", overflow="fold", max_width=NARROW_NAME if width < 100 else None)
    table.add_column("", no_wrap=True)
    table.add_column("measured", no_wrap=True, justify="right")
    table.add_column("allowed", no_wrap=True, justify="right")
    table.add_column("what it is", overflow="fold")
    for check in general_checks(report):
        allowed = f"{'≤' if check.at_most else '≥'} {shown(check.bound)}"
        table.add_row(check.name, _state(check.state), shown(check.value), allowed, Text(redact(check.description)))
    return table


def _probes(report: Report) -> Table:
    table = _table()
    for column in ("probe", "", "rewarded", "mean", "what it is"):
        numbers = column in ("rewarded", "mean")
        table.add_column(column, no_wrap=column != "what it is", justify="right" if numbers else "left")
    states = {check.name: check.state for check in report.checks}
    for probe in report.numbers["probes"]:
        state = states.get(f"{EXPLOIT}{probe['name']}", "") if probe["adversarial"] else "info"
        rewarded = f"{'–' if probe['rewarded'] is None else probe['rewarded']} of {probe['tried']}" if probe["tried"] else "–"
        table.add_row(probe["name"], _state(state), rewarded, shown(probe["mean_reward"]), probe["description"])
    return table


def _state(state: str) -> Text:
    """In at most four columns: what was not measured is named above the table."""
    return Text({"fail": "FAIL", "not measured": "–"}.get(state, state), style=STYLES.get(state, "dim"))


def findings(numbers: dict[str, Any]) -> list[str]:
    """Observations that no check covers."""
    lines = []
    agreement, length, formats, saved = numbers["agreement"], numbers["length"], numbers["formats"], numbers["saved"]
    if agreement and "accuracy" in agreement:
        wrong = f"{agreement['false_accepts']:,} wrong one{'s' * (agreement['false_accepts'] != 1)}"
        lines.append(
            f"labels: {agreement['right']:,} of {agreement['labelled']:,} right; {agreement['true_accepts']:,} of them accepted, "
            f"{wrong} accepted; Spearman {shown(agreement['spearman'])}, "
            f"Kendall {shown(agreement['kendall'])}"
        )
    lines.append(
        f"length ({length['unit']}): Spearman {shown(length['spearman'])} overall, {shown(length['within_groups'])} within "
        f"groups, {shown(length['given_label'])} at the same label"
    )
    if formats:
        moved = [f"{f['name']} {f['reject_rate']:.0%}" for f in formats["formats"] if f["reject_rate"]]
        lines.append(f"format: right responses rejected in another format: {', '.join(moved) or 'none'}")
    if saved:
        lines.append(f"saved rewards: {saved['share_equal']:.1%} of {saved['responses']:,} are unchanged")
    reference = next((p for p in numbers["probes"] if p["name"] == "reference" and p["rewarded"] is not None), None)
    if reference and reference["tried"]:
        lines.append(f"the bare reference is accepted for {reference['rewarded']} of {reference['tried']} prompts")
    return lines + unscored(numbers)


def unscored(numbers: dict[str, Any]) -> list[str]:
    count = numbers["not_scored"]
    return [f"no reward applies to {count:,} responses (their data_source matches no `when`)"] if count else []


def shown(value: float | None) -> str:
    """Counts in full, other numbers to three digits."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
