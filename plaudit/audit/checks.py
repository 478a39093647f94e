"""Measurements checked against the recipe's bounds: pass, fail, or not measured. A null bound disables its check."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from plaudit.recipe.audit import AuditSettings

EXPLOIT = "exploit: "
"""Begins the names of the checks of adversarial probes."""


@dataclass(frozen=True)
class Check:
    name: str
    state: Literal["pass", "fail", "not measured"]
    value: float | None
    bound: float
    at_most: bool
    """Whether the bound is an upper or a lower one."""
    description: str
    """What the value means; if not measured, why."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_all(numbers: dict[str, Any], settings: AuditSettings) -> list[Check]:
    """Every enabled check: the general ones first, then one per adversarial probe."""
    agreement = numbers["agreement"] or {}
    calibration = (agreement.get("reliability") or {}).get("calibration_error")
    failures, again, order = numbers["failures"], numbers["again"] or {}, numbers["order"] or {}
    unlabelled = "" if numbers["agreement"] else "no labels: "
    length, length_about = _length(numbers["length"])
    formats = (numbers["formats"] or {}).get("effect")
    probe_failures, probe_about = _probe_failures(numbers["probes"])
    rows = [
        ("accuracy", agreement.get("accuracy"), settings.min_accuracy, False, f"{unlabelled}accepted or rejected as labelled"),
        (
            "false accepts",
            agreement.get("false_accept_rate"),
            settings.max_false_accept_rate,
            True,
            f"{unlabelled}wrong, but accepted",
        ),
        (
            "false rejects",
            agreement.get("false_reject_rate"),
            settings.max_false_reject_rate,
            True,
            f"{unlabelled}right, but rejected",
        ),
        ("calibration", calibration, settings.max_calibration_error, True, "rewards against the share of right responses"),
        ("length", length, settings.max_length_correlation, True, length_about),
        ("format", formats, settings.max_format_effect, True, "right responses rejected for their format (worst format)"),
        (
            "order",
            order.get("effect"),
            settings.max_order_effect,
            True,
            "mean change under reordering, of the range",
        ),
        ("self-consistency", again.get("share_equal"), settings.min_self_consistency, False, "same reward when scored again"),
        ("failures", failures["failure_rate"], settings.max_failure_rate, True, _causes(failures)),
        ("failures on adversarial probes", probe_failures, settings.max_failure_rate, True, probe_about),
        ("malformed", failures["malformed_rate"], settings.max_malformed_rate, True, "responses that a reward cannot parse"),
        (
            "signal",
            numbers["signal"]["rate"],
            settings.max_groups_without_signal,
            True,
            "groups with identical rewards",
        ),
    ]
    if numbers["scale"]["threshold"] is None and numbers["responses"] > 1:
        rows[-1] = ("signal", 1.0, settings.max_groups_without_signal, True, "all responses get the same reward")
    checks = [
        _check(name, value, bound, at_most, description) for name, value, bound, at_most, description in rows if bound is not None
    ]
    if settings.max_exploit_rate is not None:
        for probe in numbers["probes"]:
            if probe["adversarial"]:
                name = f"{EXPLOIT}{probe['name']}"
                checks.append(
                    _check(name, probe["exploit_rate"], settings.max_exploit_rate, True, f"rewarded: {probe['description']}")
                )
    return checks


def _check(name: str, value: float | None, bound: float, at_most: bool, description: str) -> Check:
    if value is None:
        return Check(name, "not measured", None, bound, at_most, description)
    held = value <= bound + 1e-12 if at_most else value >= bound - 1e-12
    return Check(name, "pass" if held else "fail", value, bound, at_most, description)


def _length(length: dict[str, Any]) -> tuple[float | None, str]:
    """The fairest correlation available: at the same label, else within groups, else overall."""
    unlabelled = (("within_groups", "among responses to the same prompt"), ("spearman", "over all responses"))
    for key, description in (("given_label", "among responses with the same label"),) if length["labelled"] else unlabelled:
        if length[key] is not None:
            favoured = "longer ones score higher" if length[key] > 0 else "shorter ones score higher"
            return abs(length[key]), f"absolute rank correlation of reward and {length['unit']} {description}" + (
                f" ({length[key]:.3g}: {favoured})" if length[key] else ""
            )
    return None, "rewards or lengths do not vary, or lengths vary only with the label"


def _probe_failures(probes: list[dict[str, Any]]) -> tuple[float | None, str]:
    """The failure rate of the worst probe: a policy that can make a reward fail need not be right."""
    tried = [probe for probe in probes if probe["tried"]]
    worst = max(tried, key=lambda probe: probe["failed"] / probe["tried"], default=None)
    if worst is None:
        return None, "no adversarial probes were run"
    cause = f" ({worst['name']}: {worst['failure']})" if worst["failed"] else ""
    return worst["failed"] / worst["tried"], f"reward failures on the worst probe{cause}"


def _causes(failures: dict[str, Any]) -> str:
    causes = ", ".join(f"{count} {cause}" for cause, count in failures["causes"].items())
    return f"failures of the reward itself{f' ({causes})' if causes else ''}"
