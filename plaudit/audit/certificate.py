"""What an audit was of, so that training can ask for it: a digest of the rewards' settings and of the files they read.

Settings that do not change scores (how many workers, how often to retry, what becomes of a failure) are left out, and a file
counts by its content, not by where it lies.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plaudit.errors import PlauditError, nearest_path
from plaudit.files import digest_of, fingerprint
from plaudit.recipe import RewardSettings

HARMLESS = ("name", "workers", "limits", "cache", "timeout_s", "on_failure", "max_failure_rate")


def digest_rewards(rewards: Sequence[RewardSettings]) -> dict[str, str]:
    """By reward: what its scores depend on."""
    return {reward.label: _digest(reward) for reward in rewards}


def _digest(reward: RewardSettings) -> str:
    files = {str(file): fingerprint(file) if file.exists() else "absent" for file in reward.files}
    settings = {name: value for name, value in reward.model_dump(mode="json").items() if name not in HARMLESS}
    return digest_of(json.dumps([_by_content(settings, files), sorted(files.values())], sort_keys=True))


def _by_content(value: Any, files: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _by_content(inner, files) for key, inner in value.items()}
    if isinstance(value, list):
        return [_by_content(inner, files) for inner in value]
    return files.get(str(Path(value).expanduser()), value) if isinstance(value, str) else value


def require_passed(path: str | Path, rewards: Sequence[RewardSettings]) -> None:
    """Raise unless `path` is the audit.json of exactly these rewards, and says that they passed."""
    path = Path(path).expanduser()
    again = "Audit them with: plaudit audit R.yaml ROLLOUTS"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        audited, passed, failed = dict(report["rewards"]), report["passed"], report["failed"]
    except FileNotFoundError:
        raise PlauditError(f"audit.require: {path} does not exist.{nearest_path(path)} {again}") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PlauditError(f"audit.require: {path} is not an audit.json ({type(error).__name__}: {error}). {again}") from None
    now = digest_rewards(rewards)
    changed = [name for name in now if audited.get(name) != now[name]] + [name for name in audited if name not in now]
    if changed:
        names = ", ".join(dict.fromkeys(changed))
        raise PlauditError(f"audit.require: {path} is of other rewards: {names} changed since. {again}")
    if passed is not True:
        raise PlauditError(f"audit.require: {path}: these rewards did not pass ({', '.join(failed)}). Mend them, then audit again.")
