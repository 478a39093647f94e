"""The report as one HTML file, drawn in the browser with the charts of all of plaudit's pages (report/page/audit.js)."""

from typing import Any

from plaudit.audit.checks import EXPLOIT
from plaudit.audit.inspection import Report
from plaudit.audit.terminal import general_checks, scope, summarise, unscored
from plaudit.redaction import redact_all
from plaudit.report.pages import AUDIT, draw_file


def draw_page(report: Report) -> str:
    verdict = "passed" if report.passed else "failed" if report.failed else "nothing measured"
    data = {
        "verdict": verdict,
        "title": report.title,
        "files": report.files,
        "scope": scope(report),
        "summary": summarise(report.numbers),
        "checks": [check.as_dict() for check in general_checks(report)],
        "checked": [check.name for check in report.checks],
        "numbers": report.numbers | {"probes": _with_states(report)},
        "unscored": unscored(report.numbers),
    }
    return draw_file(f"Reward audit: {verdict}", AUDIT, redact_all(data))


def _with_states(report: Report) -> list[dict[str, Any]]:
    states = {check.name: check.state for check in report.checks}
    return [
        probe | {"state": states.get(f"{EXPLOIT}{probe['name']}", "not checked") if probe["adversarial"] else "info"}
        for probe in report.numbers["probes"]
    ]
