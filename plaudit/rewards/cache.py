"""Scores on disk, by what they are scores of: settings and files of the reward, prompt, and the string that was scored.

A run that was killed asks again only for what it had no answer to. Failures are not kept: they are what one wants to try again.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from plaudit.errors import RunError
from plaudit.files import digest_of, fingerprint
from plaudit.recipe import RewardSettings
from plaudit.types import Group, Score

# How a score is used, not what it is.
USE = {
    "name", "when", "weight", "combine", "scale", "clip", "normalise", "gate", "malformed", "on_failure", "max_failure_rate",
    "limits", "cache", "workers", "timeout_s",
}  # fmt: skip
HOW_REACHED = {"model": {"url", "credential", "port", "start_timeout_s"}, "sampling": {"timeout_s"}}
"""How a model is reached, not which one it is."""


class ScoreCache:
    """An SQLite file; one thread's."""

    def __init__(self, file: Path):
        self.file = file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
            self._database.execute("pragma journal_mode = wal")
            self._database.execute("pragma synchronous = normal")
            self._database.execute("create table if not exists scores (key text primary key, score text) without rowid")
        except (OSError, sqlite3.Error) as error:
            raise RunError(f"{file}: scores cannot be kept there: {error}") from None

    def get(self, keys: Sequence[str]) -> dict[str, Score]:
        found: dict[str, Score] = {}
        for start in range(0, len(keys), 500):
            some = keys[start : start + 500]
            marks = ",".join("?" * len(some))
            with closing(self._database.execute(f"select key, score from scores where key in ({marks})", some)) as rows:
                found |= {key: _loads(text) for key, text in rows}
        return found

    def put(self, scores: Mapping[str, Score]) -> None:
        rows = [(key, _dumps(score)) for key, score in scores.items() if score.value is not None]
        if rows:
            self._database.execute("begin")
            self._database.executemany("insert or replace into scores values (?, ?)", rows)
            self._database.execute("commit")

    def clear(self) -> None:
        """What was kept is not needed any more."""
        self._database.execute("delete from scores")

    def close(self) -> None:
        self._database.close()


def _dumps(score: Score) -> str:
    kept = {"value": score.value, "parts": dict(score.parts), "malformed": score.malformed, "view": score.view}
    return json.dumps({**kept, "trace": dict(score.trace)}, default=str)


def _loads(text: str) -> Score:
    return Score(**json.loads(text))


# Keys ----------------------------------------------------------------------------------------------------------------


def reward_digest(reward: RewardSettings) -> str:
    """Of all that its scores depend on, but for the samples."""
    settings = reward.model_dump(mode="json", exclude=USE & set(type(reward).model_fields))
    for section, names in HOW_REACHED.items():
        if isinstance(settings.get(section), dict):
            settings[section] = {name: value for name, value in settings[section].items() if name not in names}
    return digest_of(_json([settings, [fingerprint(file) for file in [*reward.files, *reward.own_files]]]))


def keys(digest: str, group: Group, *, scores_alone: bool) -> list[str]:
    """For each sample: of itself, or of its whole group and its place there if the reward compares them."""
    prompt = group.prompt
    asked = _json([digest, prompt.messages, prompt.tools, prompt.data_source, prompt.ground_truth, prompt.extra_info])
    about = [[sample.text, sample.num_tokens, sample.status] for sample in group.samples]
    if scores_alone:
        return [digest_of(asked + _json(one)) for one in about]
    return [digest_of(asked + _json([about, i])) for i in range(len(about))]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, sort_keys=True, default=str)
