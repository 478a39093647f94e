"""The commands of a pipeline's page, run in this process: the page's own words, with other paths, sizes and devices."""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.paths import REPOSITORY

FENCED = re.compile(r'^```(?:(?P<shell>sh)|\w+ title="(?P<title>[^"]+)")\n(?P<code>.*?)^```$', re.M | re.S)
TRAINING = ("sft", "dpo", "reward-model", "rl")
ON_A_CPU = ("run.device=cpu", "run.trackers=[]", "model.gradient_checkpointing=false", "run.save_every_minutes=null")


class PipelinePage:
    """A page of docs/pipelines. Its commands are run from the working directory, in its order, each at most once."""

    def __init__(self, name: str, plaudit: Callable[..., tuple[int, str, str]]):
        self.page, self.plaudit = REPOSITORY / "docs/pipelines" / name, plaudit
        self.commands: list[list[str]] = []
        """Those that follow the last one that was run, as lists of words."""
        self.files: dict[str, str] = {}
        """The files that a reader saves, by name."""
        for block in FENCED.finditer(self.page.read_text(encoding="utf-8")):
            if block["title"]:
                self.files[block["title"]] = block["code"]
                continue
            lines = block["code"].replace("\\\n", " ").splitlines()
            self.commands += [words[1:] for line in lines if (words := shlex.split(line, comments=True))[:1] == ["plaudit"]]

    def run(self, begins: str, *added: str, instead: Mapping[str, str] | None = None) -> str:
        """Run the next command that begins like this; return what it prints. `instead`: other words for some of it (all must
        occur); `added`: further settings."""
        other = dict(instead or {})
        at = next((i for i, words in enumerate(self.commands) if " ".join(words).startswith(begins)), None)
        assert at is not None, f"{self.page}: no further command begins with: plaudit {begins}"
        words, self.commands = self.commands[at], self.commands[at + 1 :]
        assert set(other) <= set(words), f"{set(other) - set(words)} not in: {shlex.join(words)}"
        given = [other.get(word, word) for word in words if word != "cluster.gpus=8"] + list(added)
        if words[0] in TRAINING:
            given += [*ON_A_CPU, "model.dtype=float32"]
        code, out, err = self.plaudit(*given)
        assert code == 0, f"plaudit {shlex.join(given)}\n{out}\n{err}"
        return out + err


def metrics_of(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def share_with_signal(run: str) -> float:
    """The share of all groups of a run in which rewards differ. Every step has equally many groups."""
    without = [row["groups_without_signal"] for row in metrics_of(run) if "groups_without_signal" in row]
    return 1.0 - sum(without) / len(without)
