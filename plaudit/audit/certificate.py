"""Ties an audit to the rewards it covered, so that training can require it: a digest of their settings and the files they read.

Settings that do not change scores (workers, retries, failure policy) are excluded, and files count by content, not by path. What a
file imports is not covered.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from plaudit.audit.checks import check_all
from plaudit.errors import PlauditError, nearest_path
from plaudit.recipe import AuditSettings, RewardSettings
from plaudit.rewards.cache import HARMLESS, reward_digest


def digest_rewards(rewards: Sequence[RewardSettings]) -> list[list[str]]:
    """For each reward, in order: its name, and a digest of everything its scores and their use depend on."""
    return [[reward.label, reward_digest(reward, HARMLESS)] for reward in rewards]


def require_passed(settings: AuditSettings, rewards: Sequence[RewardSettings]) -> None:
    """Raise unless the audit.json named in the settings covers exactly these rewards and is within the settings' bounds."""
    assert settings.require is not None
    path = Path(settings.require).expanduser()
    again = "Audit them with: plaudit audit R.yaml ROLLOUTS"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        audited, failed, numbers = list(report["rewards"]), list(report["failed"]), report["numbers"]
        checks = check_all(numbers, settings)
    except FileNotFoundError:
        raise PlauditError(f"audit.require: {path} does not exist.{nearest_path(path)} {again}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PlauditError(f"audit.require: {path} is not an audit.json ({type(error).__name__}: {error}). {again}") from None
    now = digest_rewards(rewards)
    if audited != now:
        names = [name for name, digest in now if [name, digest] not in audited] or ["their order"]
        raise PlauditError(f"audit.require: {path} covers different rewards: {', '.join(names)} changed since. {again}")
    failed = list(dict.fromkeys([*failed, *(check.name for check in checks if check.state == "fail")]))
    if failed or report.get("passed") is not True:
        why = ", ".join(failed) or "nothing was checked"
        raise PlauditError(f"audit.require: {path}: these rewards did not pass ({why}). Fix them, then audit again.")
    measured = {_setting(check.name) for check in checks if check.state != "not measured"}
    # Bounds that the recipe sets explicitly must have been measured.
    unmeasured = [name for name in BOUNDS.values() if name in settings.model_fields_set and name not in measured]
    unmeasured = [name for name in unmeasured if getattr(settings, name) is not None]
    if unmeasured:
        raise PlauditError(f"audit.require: {path}: not measured, but set in this recipe: {', '.join(unmeasured)}. {again}")


BOUNDS = {
    "accuracy": "min_accuracy", "false accepts": "max_false_accept_rate", "false rejects": "max_false_reject_rate",
    "calibration": "max_calibration_error", "length": "max_length_correlation", "format": "max_format_effect",
    "order": "max_order_effect", "self-consistency": "min_self_consistency", "failures": "max_failure_rate",
    "malformed": "max_malformed_rate", "signal": "max_groups_without_signal", "exploit": "max_exploit_rate",
}  # fmt: skip
"""Check → the setting that bounds it."""


def _setting(check: str) -> str | None:
    return BOUNDS.get(check.partition(":")[0])
