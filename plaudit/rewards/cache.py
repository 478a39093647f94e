"""Scores on disk, keyed by the reward's settings and files, the prompt, and the scored text.

A run that was killed and resumed scores only what is missing. Failures are not cached, so that they are tried again. Each score has
a checksum: one that a disk has damaged is not trained on but computed again, and so are all of a file that is no database any more.
"""

import json
import re
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.errors import RunError
from plaudit.files import fingerprint, model_fingerprint, text_digest
from plaudit.recipe import RewardSettings
from plaudit.report.progress import print_own_warning
from plaudit.types import Group, Score

if TYPE_CHECKING:  # it imports torch
    from plaudit.world import World

# Settings that change no score and no total: the cache itself, and the handling of failures.
HARMLESS = ("name", "cache", "workers", "on_failure", "max_failure_rate")
# Settings that change how a score is used, not the score.
USE = (*HARMLESS, "when", "weight", "combine", "scale", "bounds", "normalise", "gate", "malformed")
HOW_REACHED = ("url", "credential", "port", "program", "sleep", "rank", "prompt_price", "answer_price")
"""Settings of `model`: how it is reached and what it costs, not which one it is."""
LIMITS_OF_ANSWERS = ("unreadable_retries", "retry_temperature")
"""The only `limits` that scores depend on: which of a judge's answers is read."""


class ScoreCache:
    """An SQLite file. If it fails later (a full disk, a lock), caching stops with one warning."""

    def __init__(self, file: Path):
        self.file, self._disabled, self._is_new = file, False, not file.exists()
        self._lock = threading.Lock()
        self._clears, self._stored_since = False, set[str]()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._database = _connect(file)
            except sqlite3.Error as error:
                if not self._is_damage(error):
                    raise
                self._start_over(error)
        except (OSError, sqlite3.Error) as error:
            raise RunError(f"{file}: scores cannot be cached there: {error}") from None

    def _is_damage(self, error: sqlite3.Error) -> bool:
        """Rather than a lock or a full disk. A file with another ending than our own is the user's, whatever is in it."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) and self.file.suffix == ".sqlite"

    def _start_over(self, error: sqlite3.Error) -> None:
        aside = self.file.with_name(f"{self.file.name}.damaged")
        print_own_warning(f"{self.file} is damaged ({error}): it is now {aside.name}, and what it had is scored again")
        self.file.replace(aside)
        for more in ("-wal", "-shm"):
            self.file.with_name(self.file.name + more).unlink(missing_ok=True)
        self._database = _connect(self.file)

    def get(self, keys: Sequence[str]) -> dict[str, Score]:
        found: dict[str, Score] = {}
        if not self._disabled:
            with self._or_disable():
                found = self._get(keys)
        return found

    def _get(self, keys: Sequence[str]) -> dict[str, Score]:
        found: dict[str, Score] = {}
        for start in range(0, len(keys), 500):
            chunk = keys[start : start + 500]
            marks = ",".join("?" * len(chunk))
            with closing(self._database.execute(f"select key, score from scores where key in ({marks})", chunk)) as rows:
                found |= {key: score for key, text in rows if (score := _loads(key, text)) is not None}
        return found

    def put(self, scores: Mapping[str, Score]) -> None:
        rows = [(key, _dumps(key, score)) for key, score in scores.items() if score.value is not None and not score.transient]
        if rows and not self._disabled:
            with self._lock, self._or_disable():
                self._stored_since |= {key for key, _ in rows} if self._clears else set()
                self._database.execute("begin")
                self._database.executemany("insert or replace into scores values (?, ?)", rows)
                self._database.execute("commit")

    def begin_clear(self) -> None:
        """Scores that are stored from now on are not deleted by the next `clear`."""
        with self._lock:
            self._clears, self._stored_since = True, set()

    def clear(self) -> None:
        """Delete all scores from before `begin_clear`."""
        with self._lock, self._or_disable():
            if self._disabled:
                return
            kept = json.dumps(list(self._stored_since))
            self._clears, self._stored_since = False, set()
            self._database.execute("delete from scores where key not in (select value from json_each(?))", [kept])

    @contextmanager
    def _or_disable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            with suppress(OSError, sqlite3.Error):
                if self._is_damage(error):
                    self._database.close()
                    return self._start_over(error)
            self._disabled = True
            print_own_warning(
                f"{self.file}: scores are no longer cached ({error}); if this run is killed, they have to be computed again"
            )

    def close(self) -> None:
        """A new file without a score is removed: a command that fails at its start leaves none."""
        unused = False
        with self._lock:
            with suppress(sqlite3.Error):
                unused = self._is_new and self._database.execute("select key from scores limit 1").fetchone() is None
            self._disabled = True
            self._database.close()
        for end in ("", "-wal", "-shm") if unused else ():
            self.file.with_name(self.file.name + end).unlink(missing_ok=True)


def own_cache(folder: Path, world: "World") -> Path:
    """The file of this process. Those of processes that the run had before and has no more are removed: others score their prompts
    now, and nobody would clear them."""
    if world.leads:
        for file in folder.glob("scores_*.sqlite*"):
            if (rank := re.fullmatch(r"scores_(\d+)\.sqlite(-wal|-shm)?", file.name)) and int(rank[1]) >= world.size:
                file.unlink()
    return folder / ("scores.sqlite" if world.leads else f"scores_{world.rank}.sqlite")


def _connect(file: Path) -> sqlite3.Connection:
    # A short timeout: a locked file would block the event loop, and all rewards with it.
    database = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=0.2)
    try:
        database.execute("pragma journal_mode = wal")
        database.execute("pragma synchronous = normal")
        database.execute("create table if not exists scores (key text primary key, score text) without rowid")
        database.execute("select key, score from scores limit 1")
    except BaseException:
        database.close()
        raise
    return database


def _dumps(key: str, score: Score) -> str:
    kept = {"value": score.value, "parts": dict(score.parts), "malformed": score.malformed, "unjudged": score.unjudged}
    text = json.dumps({**kept, "view": score.view, "trace": dict(score.trace)}, default=str)
    return _checksum(key, text) + text


def _loads(key: str, stored: str) -> Score | None:
    """None if it is not what was stored."""
    if not isinstance(stored, str) or stored[:8] != _checksum(key, stored[8:]):
        return None
    return Score(**json.loads(stored[8:]))


def _checksum(key: str, text: str) -> str:
    return f"{zlib.crc32(f'{key} {text}'.encode()):08x}"


# Keys ----------------------------------------------------------------------------------------------------------------


def reward_digest(reward: RewardSettings, without: Sequence[str] = USE) -> str:
    """A digest of everything its scores depend on except the samples. Files count by content, not by path; so do a model folder's
    files, by a quick fingerprint. A model on the hub or behind a URL counts by its name."""
    files = file_digests(reward)
    return text_digest(_json([_by_content(settings_without(reward, without), files), list(files.values())]))


def file_digests(reward: RewardSettings) -> dict[str, str]:
    """A digest of each file and each model folder that its scores depend on, by path."""
    files = {str(file): fingerprint(file) if file.exists() else "absent" for file in [*reward.files, *reward.own_files]}
    folders = (Path(path).expanduser() for path in reward.models)
    return files | {str(path): model_fingerprint(path) for path in folders if path.exists()}


def settings_without(reward: RewardSettings, without: Sequence[str]) -> dict[str, Any]:
    """A reward's settings and those of the rewards inside it, without the ones named."""
    inner = {
        name: settings_without(value, HARMLESS)
        for name in type(reward).model_fields
        if isinstance(value := getattr(reward, name), RewardSettings)
    }
    settings = reward.model_dump(mode="json", exclude={*without, *inner} & set(type(reward).model_fields))
    if isinstance(model := settings.get("model"), dict):
        settings["model"] = {name: value for name, value in model.items() if name not in HOW_REACHED}
    limits = {name: value for name, value in settings.pop("limits").items() if name in LIMITS_OF_ANSWERS}
    return settings | inner | ({"limits": limits} if limits else {})


def _by_content(value: Any, files: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _by_content(inner, files) for key, inner in value.items()}
    if isinstance(value, list):
        return [_by_content(inner, files) for inner in value]
    return files.get(str(Path(value).expanduser()), value) if isinstance(value, str) else value


def keys(digest: str, group: Group, *, scores_alone: bool) -> list[str]:
    """One key per sample: of the sample alone, or of its group and its index there if the reward compares samples."""
    prompt = group.prompt
    row = _json([digest, prompt.messages, prompt.tools, prompt.data_source, prompt.ground_truth, prompt.extra_info])
    samples = [[sample.text, sample.num_tokens, sample.status] for sample in group.samples]
    if scores_alone:
        return [text_digest(row + _json(one)) for one in samples]
    return [text_digest(row + _json([samples, i])) for i in range(len(samples))]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, sort_keys=True, default=str)
