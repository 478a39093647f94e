"""The report in a terminal: the verdict, the checks, what was paid to hostile responses."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plaudit.audit.inspection import Report
from plaudit.errors import redact

STYLES = {"pass": "green", "fail": "bold red", "not measured": "dim"}


def print_report(report: Report, console: Console) -> None:
    numbers = report.numbers
    state = "pass" if report.passed else "fail"
    verdict = "PASSED" if report.passed else "FAILED" if report.failed else "NOTHING MEASURED"
    console.print(Text.assemble((f"{verdict}  ", STYLES[state]), redact(report.title)))
    console.print(Text(summarise(numbers), style="dim"))
    console.print(_checks(report))
    if any(probe["tried"] for probe in numbers["probes"]):
        console.print(_probes(report))
    for line in findings(numbers):
        console.print(Text(f"· {redact(line)}"))


def summarise(numbers: dict[str, Any]) -> str:
    scale, cost = numbers["scale"], numbers["cost"]
    parts = [f"{numbers['responses']:,} responses to {numbers['groups']:,} prompts"]
    if numbers["mean_reward"] is not None:
        parts.append(f"mean reward {shown(numbers['mean_reward'])}, range {shown(scale['low'])} to {shown(scale['high'])}")
    parts.append(f"accepted from {shown(scale['threshold'])}" if scale["threshold"] is not None else "all rewards are the same")
    parts.append(f"{cost['seconds_per_1000']:,.2f} s per 1,000")
    parts += [f"{amount:,.6g} {name.replace('_', ' ')} per 1,000" for name, amount in cost["usage_per_1000"].items()]
    return "; ".join(parts)


def _checks(report: Report) -> Table:
    """Every check; of the hostile probes only those that were paid, for the rest stand in the table below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("check", "", "measured", "allowed", "what it is"):
        table.add_column(column, overflow="fold", no_wrap=column == "")
    for check in report.checks:
        if check.name.startswith("exploit: ") and check.state != "fail":
            continue
        allowed = f"{'≤' if check.at_most else '≥'} {shown(check.bound)}"
        style = STYLES[check.state]
        word = "FAIL" if check.state == "fail" else check.state
        table.add_row(check.name, Text(word, style=style), shown(check.value), allowed, Text(redact(check.about)))
    return table


def _probes(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Paid for hostile responses", title_justify="left")
    for column in ("probe", "", "paid", "of", "mean reward", "what it is"):
        table.add_column(column, no_wrap=column != "what it is")
    states = {check.name: check.state for check in report.checks}
    for probe in report.numbers["probes"]:
        state = states.get(f"exploit: {probe['name']}", "") if probe["hostile"] else "told"
        word = Text("FAIL" if state == "fail" else state, style=STYLES.get(state, "dim"))
        accepted = "" if probe["paid"] is None else str(probe["paid"])
        table.add_row(probe["name"], word, accepted, str(probe["tried"]), shown(probe["mean_reward"]), probe["about"])
    return table


def findings(numbers: dict[str, Any]) -> list[str]:
    """What no check asks for, and a person should know."""
    told = []
    agreement, length, formats, saved = numbers["agreement"], numbers["length"], numbers["formats"], numbers["saved"]
    if agreement and "accuracy" in agreement:
        told.append(
            f"labels: {agreement['right']:,} of {agreement['labelled']:,} right; {agreement['true_accepts']:,} of them accepted, "
            f"{agreement['false_accepts']:,} wrong ones too; Spearman {shown(agreement['spearman'])}, "
            f"Kendall {shown(agreement['kendall'])}"
        )
    told.append(
        f"length ({length['unit']}): Spearman {shown(length['spearman'])} over all, {shown(length['within_groups'])} within "
        f"groups, {shown(length['given_label'])} at the same label"
    )
    if formats:
        moved = [f"{f['name']} {f['reject_rate']:.0%}" for f in formats["formats"] if f["reject_rate"]]
        told.append(f"format: right responses that are rejected in another format: {', '.join(moved) or 'none'}")
    if saved:
        told.append(f"saved rewards: {saved['share_equal']:.1%} of {saved['responses']:,} are what they are today")
    reference = next((p for p in numbers["probes"] if p["name"] == "reference" and p["paid"] is not None), None)
    if reference and reference["tried"]:
        told.append(f"the bare reference is accepted for {reference['paid']} of {reference['tried']} prompts")
    if numbers["not_asked"]:
        told.append(f"no reward applies to {numbers['not_asked']:,} responses (their data_source matches no `when`)")
    return told


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
