"""`plaudit eval policy`: how good are a model's responses, one of them, the best or the most frequent of several?

Each model samples n responses per prompt, as `plaudit sample` does, into `OUT/samples`; every reward scores them (`OUT/scores`).
One reward, the gold one, is what counts; the others are proxies that choose among responses. Of each prompt:

    reward/R         mean of reward R over its responses
    pass@k           1 − C(n−c, k) / C(n, k): at least one of k passes, that is, gold gives it at least the threshold
    majority@k       the most frequent answer of k passes; answers are read by the gold reward
    best_of@k/R      gold of the response that R likes best among k; by gold itself, it is the most that choosing can reach
    proxy@k/R        what R itself gives that response. Against √KL = √(log k − (k − 1)/k), both are the over-optimisation curve
    tokens, characters, truncated, malformed/R    means over its responses

k responses are any k of the n: figures are expectations over all subsets. Responses on which a reward failed are left out and
reported. Models are compared on the prompts that both have responses to.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.data.conversations import Source
from plaudit.errors import PlauditError, did_you_mean
from plaudit.evaluation.compared import Arrays, Part, estimate_parts, prompt_numbers, split_parts
from plaudit.evaluation.policy_tables import best_of_curves, policy_tables
from plaudit.evaluation.results import Evaluation
from plaudit.evaluation.row_files import Row, prompt_key
from plaudit.evaluation.scored import EvaluatedReward, RewardScores, file_name, score_rows
from plaudit.files import text_digest
from plaudit.loops.sample import SampleJob, sample
from plaudit.models.weights import release_memory
from plaudit.report.progress import print_line
from plaudit.rewards.reward import read_answer
from plaudit.statistics.best_of import best_of_k
from plaudit.statistics.figures import Resampling
from plaudit.statistics.prompt_samples import PromptSamples


@dataclass(frozen=True)
class EvaluatedModel:
    """A model by its name, and how it is sampled."""

    name: str
    sampling: SampleJob


@dataclass(frozen=True)
class PolicyJob:
    models: Sequence[EvaluatedModel]
    rewards: Sequence[EvaluatedReward]
    sources: Sequence[Source]
    out: Path
    resampling: Resampling
    gold: str
    """The name of the reward that counts."""
    ks: Sequence[int]
    threshold: float = 0.5

    @property
    def proxies(self) -> list[str]:
        return [reward.name for reward in self.rewards if reward.name != self.gold]


def choose_gold(rewards: Sequence[EvaluatedReward], gold: str | None) -> str:
    """The first, unless named."""
    names = [reward.name for reward in rewards]
    if gold is not None and gold not in names:
        near = did_you_mean(gold, names)
        raise PlauditError(f"--gold: no reward is called {gold!r} (found: {', '.join(names)}).{near}")
    return gold or names[0]


def choose_ks(given: str | None, n: int) -> list[int]:
    """1, 2, 4, …, n, unless given."""
    if given is None:
        return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
    try:
        ks = sorted({int(k) for k in given.split(",")})
    except ValueError:
        raise PlauditError(f"--k: should be numbers such as 1,4,16, not {given!r}") from None
    if ks[0] < 1:
        raise PlauditError(f"--k: should be at least 1, not {ks[0]}")
    if ks[-1] > n:
        raise PlauditError(f"--k: {ks[-1]} of {n} responses cannot be chosen; sample more (-n {ks[-1]}), or leave it out")
    return ks


def evaluate_policy(job: PolicyJob) -> Evaluation:
    samples = {model.name: _sample(model, several=len(job.models) > 1) for model in job.models}
    prompts = {row["id"]: row for rows in samples.values() for row in rows}  # of all models: one may leave out long ones
    figures: dict[str, Arrays] = {}
    details: dict[str, dict[str, Any]] = {}
    for model in job.models:
        rows = samples[model.name]
        scores = {reward.name: _score(job, model, reward, rows) for reward in job.rewards}
        for reward in job.rewards:
            details[f"{model.name}/{reward.name}"] = _details(reward, rows, scores[reward.name])
        own = _arrays(job, rows, scores)
        places = {row["id"]: i for i, row in enumerate(rows)}
        where = np.array([places.get(id, -1) for id in prompts])
        figures[model.name] = {name: np.where(where < 0, np.nan, array[where]) for name, array in own.items()}
    parts = split_parts(
        {
            "data source": [str(row.get("data_source") or "") for row in prompts.values()],
            "file": [id.rpartition(":")[0] for id in prompts],
        }
    )

    def arrays_of(part: Part) -> dict[str, Arrays]:
        return {name: {figure: array[part.items] for figure, array in own.items()} for name, own in figures.items()}

    numbers = prompt_numbers([prompt_key(row, id) for id, row in prompts.items()])
    found, differences = estimate_parts(parts, arrays_of, numbers, job.resampling)
    n = job.models[0].sampling.n
    inputs = {
        "files": [str(source) for source in job.sources],
        "prompts": len(prompts),
        "n": n,
        "k": list(job.ks),
        "gold": job.gold,
        "threshold": job.threshold,
        "models": {model.name: _describe(model, samples[model.name]) for model in job.models},
    }
    tables = policy_tables(job.gold, job.proxies, job.ks, job.threshold, parts, found, differences, details)
    curves = best_of_curves(found, [job.gold, *job.proxies], job.ks)
    return Evaluation("policy", inputs, job.resampling, found, differences, details, curves, tables)


# Responses and their scores ------------------------------------------------------------------------------------------


def _sample(model: EvaluatedModel, *, several: bool) -> list[Row]:
    """Its responses, in the order of the prompts; those that its file lacks are sampled."""
    if several:
        print_line(f"{model.name}: {model.sampling.model.path}")
    ids = sample(model.sampling)
    release_memory()  # for the next model, and those of rewards
    with model.sampling.out.open(encoding="utf-8", newline="\n") as file:
        rows = {row["id"]: row for row in map(json.loads, file)}
    if not ids:
        raise PlauditError(f"{model.name}: no prompt has responses, so there is nothing to evaluate")
    return [rows[id] for id in ids]


def _describe(model: EvaluatedModel, rows: Sequence[Row]) -> dict[str, Any]:
    sampling = model.sampling.sampling
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    settings = {name: getattr(sampling, name) for name in names}
    return {"path": model.sampling.model.path, "prompts": len(rows), "samples": str(model.sampling.out), **settings}


def _score(job: PolicyJob, model: EvaluatedModel, reward: EvaluatedReward, rows: Sequence[Row]) -> RewardScores:
    path, first = model.sampling.model.path, model.sampling.max_prompts
    folder = file_name(model.name) + (f"-first{first}" if first else "")  # samples are shared with an evaluation of all prompts
    reward = replace(reward, rewards=tuple(one.of_policy(path) for one in reward.rewards))
    return score_rows(
        reward, [(row, row["id"], f"{model.sampling.out}: {row['id']}") for row in rows],
        job.out / "scores" / folder, {"items": text_digest(repr(rows))},
        given_order=False, label=f"{model.name}, {reward.name}" if len(job.models) > 1 else reward.name,
    )  # fmt: skip


def _details(reward: EvaluatedReward, rows: Sequence[Row], scored: RewardScores) -> dict[str, Any]:
    responses = sum(map(len, scored.values))
    without = sum(value is None for row in scored.values for value in row)
    counts = {"items": len(rows), "responses": responses, "without a value": without}
    # Not under `rewards`, as in evaluations of rewards: training cannot require this one.
    return {"recipe": str(reward.recipe), "reward": reward.identity["rewards"]} | counts | scored.report()


# Figures -------------------------------------------------------------------------------------------------------------


def _arrays(job: PolicyJob, rows: Sequence[Row], scores: dict[str, RewardScores]) -> Arrays:
    """The figures of each prompt."""
    values = {name: [np.array(row, dtype=np.float64) for row in own.values] for name, own in scores.items()}
    rewards = next(reward.rewards for reward in job.rewards if reward.name == job.gold)
    answers = [[read_answer(rewards, views) for views in row] for row in scores[job.gold].views]
    prompts = [PromptSamples(own, given, job.threshold) for own, given in zip(values[job.gold], answers, strict=True)]
    found: dict[str, list[float]] = {
        f"reward/{name}": [PromptSamples(one, (), 0.0).mean for one in own] for name, own in values.items()
    }
    found |= {f"malformed/{name}": [float(np.mean(row)) for row in own.is_malformed] for name, own in scores.items()}
    found |= {f"pass@{k}": [prompt.pass_at(k) for prompt in prompts] for k in job.ks}
    if any(reward.reads_answers for reward in rewards):
        found |= {f"majority@{k}": [prompt.majority_at(k) for prompt in prompts] for k in job.ks}
    for name, own in values.items():
        both = list(zip(prompts, own, strict=True))
        for k in job.ks:
            found[f"best_of@{k}/{name}"] = [prompt.best_of(k, proxy) for prompt, proxy in both]
            if name != job.gold:
                # Of the same responses: those that both rewards have values for.
                known = [np.where(np.isnan(prompt.values), np.nan, proxy) for prompt, proxy in both]
                found[f"proxy@{k}/{name}"] = [best_of_k(proxy, proxy, k) for proxy in known]
    found |= _lengths(rows)
    return {name: np.array(own, dtype=np.float64) for name, own in found.items()}


def _lengths(rows: Sequence[Row]) -> dict[str, list[float]]:
    def text(response: Any) -> str:
        return response["text"] if isinstance(response, dict) else response

    counted = [[np.nan if count is None else float(count) for count in row["tokens"]] for row in rows]
    return {
        "tokens": [float(np.mean(row)) for row in counted],
        "characters": [float(np.mean([len(text(response)) for response in row["responses"]])) for row in rows],
        "truncated": [float(np.mean([status == "truncated" for status in row["status"]])) for row in rows],
    }
