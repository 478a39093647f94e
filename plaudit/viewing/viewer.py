"""What the pages show, as plain data: runs, metrics, steps, samples, diagnostics. What it finds out stays in memory."""

import shlex
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from plaudit.errors import PlauditError
from plaudit.viewing.metrics_log import as_points, thin
from plaudit.viewing.sources import NotThere, Source
from plaudit.viewing.statistics_of_steps import is_needed, step_statistics
from plaudit.viewing.step_summary import group_starts
from plaudit.viewing.steps import read_sample, read_step, read_tokens

JUDGES = ("cascade", "critique_then_score", "group_judge", "judge", "pairwise_judge", "rubric_judge", "scalar_model", "similarity")
"""Kinds of rewards that call a model."""
MAX_DIAGNOSED = 200
"""Steps of a run with diagnostics: evenly spaced, because each means reading all of a step's samples."""
BUDGET_S = 1.0
"""Longest time that a request computes; what is left comes with the next one."""
CACHED_STEPS = 16
MAX_PROBLEMS = 5
"""Shown one by one; of further ones, how many there are."""
STAGES = ("sft", "dpo", "reward_model", "rl", "samples")


@dataclass(frozen=True)
class Diagnosed:
    """What a step's samples show, or why they cannot be read."""

    version: Any
    """Of the file that was read."""
    values: dict[str, float]
    problem: str | None = None


class Viewer:
    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)
        self.names = unique_names([source.path for source in sources])
        self._diagnosed: list[dict[int, Diagnosed]] = [{} for _ in sources]
        self._prompts: list[dict[tuple[str, int], tuple[Any, dict[str, int]]]] = [{} for _ in sources]
        self._steps: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()
        self._locks = [threading.Lock() for _ in sources]

    def source(self, number: int) -> Source:
        if not 0 <= number < len(self.sources):
            raise NotThere(f"there is no run number {number}")
        return self.sources[number]

    def read_ahead(self) -> None:
        """What the first pages need: first the last step of each run, because the first one that a process reads takes ten times as
        long, then the metrics. Reports nothing: whoever asks for a page gets to know what is wrong with it."""
        for number, source in enumerate(self.sources):
            for split, (_, last, _) in _span(source).items():
                with suppress(PlauditError, OSError):
                    self.step(number, split, last)
        with suppress(PlauditError, OSError):
            self.runs()

    # Runs and metrics

    def runs(self) -> list[dict[str, Any]]:
        return [
            {
                "id": i,
                "name": self.names[i],
                "path": str(source.path),
                "kind": source.kind,
                **source.describe(),
                "samples": _span(source),
            }
            for i, source in enumerate(self.sources)
        ]

    def metrics(self, number: int) -> dict[str, Any]:
        """Every metric, thinned; of a dump, what its samples show."""
        source = self.source(number)
        if source.metrics is None:
            found = self.diagnostics(number)
            series = {
                name.replace("part/", "parts/", 1): each
                for name, each in found["series"].items()
                if name in ("reward", "length", "truncated") or name.startswith("part/")
            }
            return {"series": series, "seconds": None, "done": found["done"], "of": found["of"]}
        with self._locks[number]:
            source.metrics.refresh()
            series = {name: thin(one) for name, one in source.metrics.series.items()}
            return {"series": series, "seconds": thin(source.metrics.seconds), "version": source.metrics.version}

    # Samples

    def steps(self, number: int) -> dict[str, list[int]]:
        return self.source(number).steps()

    def step(self, number: int, split: str, step: int, row: int = 0) -> dict[str, Any]:
        """The groups and samples of a step; of a very large one, those around a row."""
        source = self.source(number)
        of_step = (number, split, step, source.version(split, step))
        # A copy: another request may evict one at any moment.
        known = [found for key, found in list(self._steps.items()) if key[:-1] == of_step]
        found = next((each for each in known if _is_on_page(each, row)), None)
        if found is None:
            found = {**read_step(source, split, step, row), "audit": self._audit_command(number, split, step)}
            self._steps[*of_step, found["first"]] = found
            while len(self._steps) > CACHED_STEPS:
                self._steps.popitem(last=False)
        return found

    def _audit_command(self, number: int, split: str, step: int) -> str:
        source = self.source(number)
        recipe = str(source.path / "recipe.yaml") if source.kind == "run" else "R.yaml"
        return shlex.join(["plaudit", "audit", recipe, str(source.file(split, step)), "--out", f"audit_step_{step}"])

    def sample(self, number: int, split: str, step: int, row: int) -> dict[str, Any]:
        return read_sample(self.source(number), split, step, row)

    def tokens(self, number: int, split: str, step: int, row: int) -> dict[str, Any]:
        return read_tokens(self.source(number), split, step, row)

    def same_prompt(self, number: int, prompt_id: str) -> dict[str, Any]:
        """Where else this prompt was sampled; looks through further steps with every call until all were."""
        source, seen = self.source(number), self._prompts[number]
        todo = [(split, step) for split, steps in source.steps().items() for step in steps]
        ends = time.monotonic() + BUDGET_S
        with self._locks[number]:
            for split, step in todo:
                version = source.version(split, step)
                if ((split, step) not in seen or seen[split, step][0] != version) and time.monotonic() < ends:
                    seen[split, step] = (version, _prompt_rows(source, split, step))
        found = [
            {"split": split, "step": step, "row": rows[prompt_id]}
            for (split, step) in todo
            if prompt_id in (rows := seen.get((split, step), (None, {}))[1])
        ]
        return {"found": found, "searched": sum(place in seen for place in todo), "of": len(todo)}

    # Diagnostics

    def diagnostics(self, number: int, split: str = "train") -> dict[str, Any]:
        """Statistics of evenly spaced steps; those that are missing yet are computed in the calls that follow."""
        source, known = self.source(number), self._diagnosed[number]
        chosen = evenly_spaced(source.steps()[split], MAX_DIAGNOSED)
        rewards = source.describe()["rewards"] if source.kind == "run" else []
        judges = [reward["label"] for reward in rewards if reward["kind"] in JUDGES]
        rules = [reward["label"] for reward in rewards if reward["kind"] not in JUDGES]
        ends = time.monotonic() + BUDGET_S
        with self._locks[number]:
            for step in from_coarse_to_fine(chosen):
                version = source.version(split, step)
                if (step not in known or known[step].version != version) and time.monotonic() < ends:
                    known[step] = _diagnose(source, split, step, version, judges, rules)
        done = [step for step in chosen if step in known]
        names = dict.fromkeys(name for step in done for name in known[step].values)
        series = {}
        for name in names:
            having = [step for step in done if name in known[step].values]
            series[name] = as_points(having, [known[step].values[name] for step in having])
        problems = [problem for step in done if (problem := known[step].problem) is not None]
        more = len(problems) - MAX_PROBLEMS
        return {
            "series": series | (self._group_statistics(number) if split == "train" else {}),
            "done": len(done),
            "of": len(chosen),
            "steps": len(source.steps()[split]),
            "problems": problems[:MAX_PROBLEMS] + ([f"{more:,} more steps cannot be read."] if more > 0 else []),
        }

    def _group_statistics(self, number: int) -> dict[str, Any]:
        """Those that the run has written itself: of every step, not only of those whose samples are read."""
        logged = self.metrics(number)["series"] if self.source(number).metrics is not None else {}
        found = {name: one for name, one in logged.items() if name.startswith(("group_std/", "signal/"))}
        return found | ({"groups without signal": logged["groups_without_signal"]} if "groups_without_signal" in logged else {})


def _diagnose(source: Source, split: str, step: int, version: Any, judges: Sequence[str], rules: Sequence[str]) -> Diagnosed:
    try:
        return Diagnosed(version, step_statistics(source.read(split, step, is_needed), judges, rules))
    except KeyError as error:
        return Diagnosed(version, {}, f"{source.file(split, step)} has no column {error}. Other steps are not affected.")
    except (PlauditError, pa.ArrowException) as error:
        return Diagnosed(version, {}, str(error))


def _is_on_page(step: Mapping[str, Any], row: int) -> bool:
    return step["first"] <= row < step["first"] + max(len(step["samples"]), 1)


def _prompt_rows(source: Source, split: str, step: int) -> dict[str, int]:
    """The first row of each prompt."""
    try:
        table = source.read(split, step, lambda name: name in ("prompt_id", "index"))
    except NotThere:
        return {}
    ids = table.column("prompt_id").to_pylist()
    return {ids[start]: start for start in group_starts(ids, table.column("index").to_pylist())}


def _span(source: Source) -> dict[str, list[int]]:
    """First and last step with samples, and how many there are."""
    return {split: [steps[0], steps[-1], len(steps)] for split, steps in source.steps().items() if steps}


def evenly_spaced(steps: Sequence[int], most: int) -> list[int]:
    """Every 2ᵏ-th step and the last: as a run grows, those chosen before stay chosen."""
    stride = 1
    while len(steps) > most * stride:
        stride *= 2
    chosen = list(steps[::stride])
    return chosen if not steps or chosen[-1] == steps[-1] else [*chosen, steps[-1]]


def from_coarse_to_fine(steps: Sequence[int]) -> list[int]:
    """The last and the first one, then those in the middle of what is left: a curve has its shape early."""
    order: list[int] = []
    stride = 1 << max(len(steps) - 1, 1).bit_length()
    while stride >= 1:
        order += [steps[i] for i in range(0, len(steps), stride)]
        stride //= 2
    return list(dict.fromkeys([*steps[-1:], *order]))


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The last folders of each path, as many as it takes to tell them apart: `a/rl`, `b/rl`. A stage's name alone says little."""
    parts = [path.absolute().parts for path in paths]
    least = 2 if any(each[-1] in STAGES for each in parts) else 1
    for depth in range(least, 1 + max(map(len, parts), default=1)):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(each[-2:])} ({i})" for i, each in enumerate(parts, 1)]
