"""The report as a self-contained HTML page: no external scripts, fonts or images; light and dark."""

import re
from collections.abc import Iterable, Sequence, Set
from html import escape
from typing import Any

from plaudit.audit.checks import EXPLOIT
from plaudit.audit.inspection import Report
from plaudit.audit.terminal import general_checks, scope, shown, summarise, unscored
from plaudit.redaction import redact
from plaudit.report.pages import style_sheet

INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


def draw_page(report: Report) -> str:
    numbers = report.numbers
    state, verdict = ("pass", "passed") if report.passed else ("fail", "failed" if report.failed else "nothing measured")
    checked = {check.name for check in report.checks}
    body = [
        f'<h1>Reward audit: <span class="{state}">{verdict}</span></h1>',
        f"<p>{_text(report.title)} on {_text(', '.join(report.files))}</p>",
        f"<p>{_text(scope(report))}</p>",
        f'<p class="dim">{_text(summarise(numbers))}</p>',
        _section("Checks", _checks(report)),
        _section("Adversarial probes", _probes(report)) if any(probe["tried"] for probe in numbers["probes"]) else "",
        _section("Against the labels", _agreement(numbers["agreement"], checked)) if numbers["agreement"] else "",
        _section("Length", _length(numbers["length"])),
        _section("The same answer in another format", _formats(numbers["formats"])) if numbers["formats"] else "",
        _section("Scored again", _again(numbers)),
        _section("Each reward", _rewards(numbers["rewards"])) if len(numbers["rewards"]) > 1 else "",
        _section("Not scored", _not_scored(numbers)) if numbers["failures"]["causes"] or numbers["not_scored"] else "",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Reward audit: {verdict}</title>'
    page = "\n".join(body)
    return f"<!doctype html>\n<html lang=en><head>{head}{style_sheet()}</head><body class=report>\n{page}\n</body></html>\n"


def _text(value: Any) -> str:
    """Escape, and make invisible characters visible: a probe must not reverse the page's text direction."""
    return escape(INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", redact(str(value))))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]], raw: Sequence[int] = ()) -> str:
    """Columns of numbers are right-aligned, heads included; columns in `raw` contain HTML."""
    rows = list(rows)
    numeric = [all(isinstance(row[column], int | float | None) for row in rows) for column in range(len(heads))]

    def cell(column: int, value: Any) -> str:
        if numeric[column]:
            return f'<td class="n">{shown(value)}</td>'
        return f"<td>{value if column in raw else _text(value)}</td>"

    head = "".join(f"<th{' class=n' * number}>{_text(name)}</th>" for name, number in zip(heads, numeric, strict=True))
    lines = "".join(f"<tr>{''.join(cell(column, value) for column, value in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _state(state: str) -> str:
    return f'<span class="{state if state in ("pass", "fail") else "dim"}">{_text(state)}</span>'


def _checks(report: Report) -> str:
    rows = [
        (c.name, _state(c.state), c.value, f"{'at most' if c.at_most else 'at least'} {shown(c.bound)}", c.description)
        for c in general_checks(report)
    ]
    return _table(("check", "", "measured", "allowed", "what it is"), rows, raw=(1,))


def _probes(report: Report) -> str:
    states = {check.name: check.state for check in report.checks}
    rows = []
    for p in report.numbers["probes"]:
        state = states.get(f"{EXPLOIT}{p['name']}", "not checked") if p["adversarial"] else "info"
        rows.append((p["name"], _state(state), p["rewarded"], p["tried"], p["mean_reward"], p["failed"], p["description"]))
    table = _table(("probe", "", "rewarded", "of", "mean reward", "failures", "what it is"), rows, raw=(1,))
    exploited = [p for p in report.numbers["probes"] if p["adversarial"] and p["rewarded"]]
    return table + "".join(_examples(probe) for probe in exploited)


def _examples(probe: dict[str, Any]) -> str:
    examples = "".join(
        f"<pre>{_text(e['prompt'])}</pre><p class=dim>reference {_text(e['reference'])}; reward {shown(e['reward'])} for:</p>"
        f"<pre>{_text(e['response'])}</pre>"
        for e in probe["worst"]
    )
    return f"<details><summary>{_text(probe['name'])}: examples with the highest reward</summary>{examples}</details>"


def _agreement(agreement: dict[str, Any], checked: Set[str]) -> str:
    """`checked`: names of the checks, whose rates are in their table already."""
    parts = []
    if "accuracy" in agreement:
        a = agreement
        rows = [("accepted", a["true_accepts"], a["false_accepts"]), ("rejected", a["false_rejects"], a["true_rejects"])]
        parts.append(_table(("", "labelled right", "labelled wrong"), rows))
        rates = {"accuracy": "accuracy", "false accepts": "false_accept_rate", "false rejects": "false_reject_rate"}
        unchecked = [f"{name} {shown(a[rate])}" for name, rate in rates.items() if name not in checked]
        parts.append(f"<p>{', '.join(unchecked)}</p>" if unchecked else "")
    parts.append(
        f"<p>rank correlation with the labels: Spearman {shown(agreement['spearman'])}, Kendall {shown(agreement['kendall'])}</p>"
    )
    left, reliability = "".join(parts), agreement["reliability"]
    if reliability is None:
        return left
    bars = [(f"{b['from']:.1f}", b["share_right"], f"{b['count']:,}", b["mean_reward"]) for b in reliability["bins"]]
    error = (
        "<p class=dim>Share of right responses by reward; the mark is the mean reward. "
        f"Calibration error {shown(reliability['calibration_error'])}.</p>"
    )
    return f'<div class="two"><div>{left}</div><div>{_bars(bars)}{error}</div></div>'


def _length(length: dict[str, Any]) -> str:
    bars = [(f"{d['from']:.0f}–{d['to']:.0f}", d["mean_reward"], f"{d['count']:,}", None) for d in length["deciles"]]
    text = (
        f"<p>Rank correlation of reward and {length['unit']}: {shown(length['spearman'])} overall, "
        f"{shown(length['within_groups'])} within groups, {shown(length['given_label'])} among responses with the same label.</p>"
        f"<p class=dim>Mean reward by decile of length, shortest first.</p>"
    )
    return f'<div class="two"><div>{text}</div><div>{_bars(bars)}</div></div>'


def _bars(bars: Sequence[tuple[str, float, str, float | None]]) -> str:
    """A bar chart of (label, height, tooltip, height of a mark); bars start at zero."""
    if not bars:
        return ""
    heights = [0.0, *(height for _, height, *_ in bars), *(mark for *_, mark in bars if mark is not None)]
    low, high = min(heights), max(heights)
    span, width, tall = (high - low) or 1.0, 40, 120

    def y(value: float) -> float:
        return round(10 + (high - value) / span * tall, 1)

    parts = [f'<line class="axis" x1="36" x2="{36 + width * len(bars)}" y1="{y(0)}" y2="{y(0)}"/>']
    parts += [f'<text x="32" y="{y(value) + 4}" text-anchor="end">{shown(value)}</text>' for value in dict.fromkeys((low, high))]
    for i, (label, height, detail, mark) in enumerate(bars):
        x = 40 + i * width
        top, bottom = min(y(height), y(0)), max(y(height), y(0))
        tip = f"<title>{_text(label)}: {shown(height)} ({_text(detail)})</title>"
        parts.append(f'<rect class="bar" x="{x}" y="{top}" width="{width - 8}" height="{max(bottom - top, 1):.1f}">{tip}</rect>')
        parts.append(f'<text x="{x + width / 2 - 4}" y="{tall + 26}" text-anchor="middle">{_text(label)[:9]}</text>')
        if mark is not None:
            parts.append(f'<line class="mark" x1="{x}" x2="{x + width - 8}" y1="{y(mark)}" y2="{y(mark)}"/>')
    return f'<svg viewBox="0 0 {44 + width * len(bars)} {tall + 34}" role="img">{"".join(parts)}</svg>'


def _formats(formats: dict[str, Any]) -> str:
    rows = [(f["name"], f["tried"], f["rejected"], f["reject_rate"], f["mean_difference"]) for f in formats["formats"]]
    return _table(("format", "tried", "rejected", "share", "mean difference"), rows)


def _again(numbers: dict[str, Any]) -> str:
    rows = [
        (name, m["responses"], m["share_equal"], m["mean_difference"], m["greatest_difference"])
        for name, m in (
            ("same order", numbers["again"]),
            ("another order", numbers["order"]),
            ("when it was saved", numbers["saved"]),
        )
        if m
    ]
    return (
        _table(("", "responses", "share with the same reward", "mean difference", "greatest"), rows)
        if rows
        else "<p>not measured</p>"
    )


def _rewards(rewards: dict[str, Any]) -> str:
    rows = [(name, r["responses"], r["mean"], r["least"], r["greatest"], r["length_spearman"]) for name, r in rewards.items()]
    return _table(("reward", "responses", "mean", "least", "greatest", "correlation with length"), rows)


def _not_scored(numbers: dict[str, Any]) -> str:
    failures = numbers["failures"]
    causes = [(cause, count, failures["messages"].get(cause, "")) for cause, count in failures["causes"].items()]
    table = _table(("failures", "responses", "example"), causes) if causes else ""
    return table + "".join(f"<p>{_text(line)}</p>" for line in unscored(numbers))
