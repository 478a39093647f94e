"""The report in a terminal: verdict, checks, adversarial probes."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plaudit.audit.checks import EXPLOIT, Check
from plaudit.audit.inspection import Report
from plaudit.errors import redact

STYLES = {"pass": "green", "fail": "bold red", "not measured": "dim"}


def print_report(report: Report, console: Console) -> None:
    numbers = report.numbers
    state = "pass" if report.passed else "fail"
    verdict = "PASSED" if report.passed else "FAILED" if report.failed else "NOTHING MEASURED"
    console.print(Text.assemble((f"{verdict}  ", STYLES[state]), f"{redact(report.title)}: {scope(report)}"))
    console.print(Text(summarise(numbers), style="dim"))
    console.print(_checks(report))
    if any(probe["tried"] for probe in numbers["probes"]):
        console.print(_probes(report))
    for line in findings(numbers):
        console.print(Text(f"· {redact(line)}"))


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


def _checks(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("check", "", "measured", "allowed", "what it is"):
        numbers = column in ("measured", "allowed")
        table.add_column(column, overflow="fold", no_wrap=column == "" or numbers, justify="right" if numbers else "left")
    for check in general_checks(report):
        allowed = f"{'≤' if check.at_most else '≥'} {shown(check.bound)}"
        style = STYLES[check.state]
        word = "FAIL" if check.state == "fail" else check.state
        table.add_row(check.name, Text(word, style=style), shown(check.value), allowed, Text(redact(check.description)))
    return table


def _probes(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Adversarial probes", title_justify="left")
    for column in ("probe", "", "rewarded", "of", "mean reward", "what it is"):
        numbers = column in ("rewarded", "of", "mean reward")
        table.add_column(column, no_wrap=column != "what it is", justify="right" if numbers else "left")
    states = {check.name: check.state for check in report.checks}
    for probe in report.numbers["probes"]:
        state = states.get(f"{EXPLOIT}{probe['name']}", "") if probe["adversarial"] else "info"
        word = Text("FAIL" if state == "fail" else state, style=STYLES.get(state, "dim"))
        rewarded = "" if probe["rewarded"] is None else str(probe["rewarded"])
        table.add_row(probe["name"], word, rewarded, str(probe["tried"]), shown(probe["mean_reward"]), probe["description"])
    return table


def findings(numbers: dict[str, Any]) -> list[str]:
    """Observations that no check covers."""
    lines = []
    agreement, length, formats, saved = numbers["agreement"], numbers["length"], numbers["formats"], numbers["saved"]
    if agreement and "accuracy" in agreement:
        lines.append(
            f"labels: {agreement['right']:,} of {agreement['labelled']:,} right; {agreement['true_accepts']:,} of them accepted, "
            f"{agreement['false_accepts']:,} wrong ones accepted; Spearman {shown(agreement['spearman'])}, "
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
