"""Several reward models in one run: who shares a model, who is on the device when, what it all costs, and what becomes of a run whose
judge dies. The models are real ones, tiny, on the CPU; servers are real HTTP servers."""

import asyncio
import gc
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any, Self

import pytest
import torch
from aiohttp import web
from conftest import prompt_rows, rl_recipe, train_rl, write_jsonl, write_recipe
from fault_server import FaultServer
from test_local_models import make_classifier
from test_rewards import group, values
from transformers import AutoModelForCausalLM, AutoTokenizer

from plaudit.data.rows import read_rows
from plaudit.errors import RecipeError
from plaudit.recipe import ScoreRecipe
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Question, Writing
from plaudit.reward_models.client import Client
from plaudit.reward_models.local import Local
from plaudit.reward_models.weights import CENSUS, Weights
from plaudit.rewards.runner import RewardRunner
from plaudit.types import ScoredGroup

pytest.register_assert_rewrite("engine_contract")
from engine_contract import sharpen  # noqa: E402

GROUPS = [group(f"{i} apples", f"It is {i + 2}.", "no", id=f"p{i}", truth=str(i)) for i in range(3)]
PLUGIN = dedent("""
    def rm_preprocess(text_prompts, text_responses, tgt_tokenizer):
        return [f"{prompt} {response}\\nPoints:" for prompt, response in zip(text_prompts, text_responses)]

    def rm_postprocess(results):
        return [float(result) / 9 for result in results]
""")


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr("plaudit.run.draw_curves", lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Unloading collects garbage, which takes its time where torch and transformers are in memory; they stay anyway."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make_grader(source: Path, folder: Path, seed: int) -> Path:
    """A judge whose whole answer is a digit, which depends on what it reads."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)
    sharpen(model)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    end = model.generation_config.eos_token_id = tokenizer.eos_token_id
    embeddings, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    torch.manual_seed(seed)
    head.zero_()
    head[digits] = 3.0 * torch.randn(10, head.shape[1])
    head[:, 0] = 0.0
    head[end, 0] = 5.0  # behind a digit, and only there, the first dimension is large: the end follows
    embeddings[:, 0] = 0.0
    embeddings[digits, 0] = 200.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tiny_models, tmp_path_factory) -> dict[str, Path]:
    """Two scalar models, and two that write."""
    root = tmp_path_factory.mktemp("reward_models")
    return {
        "kind": make_classifier(tiny_models["llama"], root / "kind"),
        "short": make_classifier(tiny_models["qwen3"], root / "short"),
        "grader": make_grader(tiny_models["llama"], root / "grader", seed=0),
        "rider": make_grader(tiny_models["llama"], root / "rider", seed=1),
    }


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """The models whose weights came to the device, in order."""
    loaded, load = [], Weights.load
    assert CENSUS.alive() == []
    CENSUS.most_offloaded = 0

    def load_and_record(self):
        if not self.present:
            loaded.append(Path(self._name).name)
        load(self)

    monkeypatch.setattr(Weights, "load", load_and_record)
    return loaded


def model(folder: Path, placement: str = "offload", **settings) -> dict[str, Any]:
    return {"path": str(folder), "placement": placement, "device": "cpu", **settings}


JUDGING = {"kind": "judge", "sampling": {"max_new_tokens": 4, "retry": 0}}


def runner_of(*rewards: dict[str, Any], **settings) -> RewardRunner:
    return RewardRunner(ScoreRecipe.model_validate({"rewards": rewards}).rewards, **settings)


def by_reward(scored: list[ScoredGroup]) -> dict[str, list[float | None]]:
    return {name: [score.value for one in scored for score in one.by_reward[name]] for name in scored[0].by_reward}


# Sharing a model -----------------------------------------------------------------------------------------------------


def test_rewards_with_the_same_model_share_it(folders, loads):
    rewards = [
        {"kind": "scalar_model", "name": "all", "model": model(folders["kind"])},
        {**JUDGING, "name": "grade", "model": model(folders["grader"])},
        {"kind": "scalar_model", "name": "line", "model": model(folders["kind"]), "view": {"extract": "line"}},
        {**JUDGING, "name": "again", "model": model(folders["grader"]), "gate": {"reward": "grade", "above": -1}},
    ]
    with runner_of(*rewards) as runner:
        first, second = by_reward(runner.collect(GROUPS)), by_reward(runner.collect(GROUPS))
        counts = runner.counts()
    assert loads == ["kind", "grader"] * 2, "each once in a scoring phase"
    assert CENSUS.most_offloaded == 1
    assert CENSUS.alive() == []
    assert first == second
    assert first["all"] == pytest.approx(first["line"], abs=1e-5)
    assert first["grade"] == first["again"]
    assert len(set(first["grade"])) > 1
    calls = {name: counts[f"judge/{name}/calls"] for name in ("kind", "kind/all", "kind/line", "grader", "grader/again")}
    assert calls == {"kind": 36, "kind/all": 18, "kind/line": 18, "grader": 36, "grader/again": 18}
    assert counts["judge/calls"] == 72
    assert counts["judge/grader/new_tokens"] == counts["judge/new_tokens"] == 36 * 2
    assert counts["judge/kind/all/prompt_tokens"] + counts["judge/kind/line/prompt_tokens"] == counts["judge/kind/prompt_tokens"]


def test_a_resident_model_is_there_once_until_the_last_reward_closes(folders, loads):
    critique = {"kind": "critique_then_score", "model": model(folders["grader"], "resident"), "sampling": {"max_new_tokens": 4}}
    rewards = [
        {**JUDGING, "model": model(folders["grader"], "resident")},
        {**critique, "scorer": {**JUDGING, "model": model(folders["grader"], "resident")}},
    ]
    with runner_of(*rewards) as runner:
        assert [Path(alive.name).name for alive in CENSUS.alive()] == ["grader"]
        runner.collect(GROUPS)
        [judge, *_] = runner.rewards
        asyncio.run_coroutine_threadsafe(judge.close(), runner._loop).result()
        assert len(CENSUS.alive()) == 1, "the other reward still has it"
    assert CENSUS.alive() == []
    assert loads == ["grader"]


def test_models_that_differ_in_anything_are_not_shared(folders, loads):
    first = {"kind": "scalar_model", "name": "first", "model": model(folders["kind"], "resident")}
    second = {**first, "name": "second", "model": model(folders["kind"], "resident", max_prompt_tokens=8)}
    with runner_of(first, second) as runner:
        runner.collect(GROUPS)
        counts = runner.counts()
    assert loads == ["kind", "kind"]
    assert {name for name in counts if name.endswith("calls")} == {"judge/calls", "judge/kind/calls", "judge/kind 2/calls"}


def test_a_model_that_cannot_be_opened_is_told_once(tmp_path, monkeypatch):
    tried, open_ = [], Local.open

    async def open_and_count(self):
        tried.append(self.name)
        await open_(self)

    monkeypatch.setattr(Local, "open", open_and_count)
    nowhere = model(tmp_path / "none", "resident")
    with pytest.raises(RecipeError, match="there is no such folder"):
        runner_of({**JUDGING, "name": "a", "model": nowhere}, {**JUDGING, "name": "b", "model": nowhere}).__enter__()
    assert len(tried) == 1


# One model at a time -------------------------------------------------------------------------------------------------


def critique_of(folders: dict[str, Path], placement: str) -> dict[str, Any]:
    return {
        "kind": "critique_then_score",
        "model": model(folders["grader"], placement),
        "sampling": {"max_new_tokens": 4},
        "scorer": {"kind": "scalar_model", "model": model(folders["kind"], placement)},
    }


@pytest.mark.parametrize("limits", [{}, {"at_once": 1}])
def test_all_critiques_are_written_before_the_scorer_comes(folders, loads, tmp_path, limits):
    reward = {**critique_of(folders, "offload"), "limits": limits}
    with runner_of(reward, cache=tmp_path / "scores.sqlite") as runner:
        offloaded = runner.collect(GROUPS)
        assert loads == ["grader", "kind"]
        assert by_reward(runner.collect(GROUPS)) == by_reward(offloaded), "from the cache"
        counts = runner.counts()
    assert (counts["judge/grader/calls"], counts["judge/kind/calls"]) == (9, 9)
    assert CENSUS.most_offloaded == 1
    with runner_of(critique_of(folders, "resident")) as runner:
        resident = runner.collect(GROUPS)
    assert [score.view for one in offloaded for score in one.by_reward["critique_then_score"]] == [
        score.view for one in resident for score in one.by_reward["critique_then_score"]
    ]
    assert by_reward(offloaded)["critique_then_score"] == pytest.approx(by_reward(resident)["critique_then_score"], abs=1e-5)


def test_critic_and_scorer_are_shared_with_other_rewards(folders, loads):
    rewards = [
        {"kind": "scalar_model", "model": model(folders["kind"])},
        critique_of(folders, "offload"),
        {**JUDGING, "model": model(folders["grader"])},
        {"kind": "scalar_model", "name": "other", "model": model(folders["short"])},
    ]
    with runner_of(*rewards) as runner:
        runner.collect(GROUPS)
    assert sorted(loads) == ["grader", "kind", "short"]
    assert loads.index("grader") < loads.index("kind"), "the one that is needed twice waits until both need it"
    assert CENSUS.most_offloaded == 1


def test_a_critic_that_fails_fails_its_samples(folders, loads):
    sampling = {"max_new_tokens": 2048, "retry": 0}  # all that the model takes: there is no room for a prompt
    reward = critique_of(folders, "offload") | {"sampling": sampling, "limits": {"retries": 1, "backoff_s": 0.0}}
    with runner_of(reward, tolerant=True) as runner:
        scored = runner.collect(GROUPS)
        counts = runner.counts()
    causes = {score.failure.cause for one in scored for score in one.by_reward["critique_then_score"] if score.failure}
    assert causes == {"context"}
    assert counts["retries/critique_then_score"] == 9, "while the critic is there"
    assert counts["judge/kind/calls"] == 0


def test_a_cascade_of_two_offloaded_models(folders, loads):
    given = {
        "kind": "cascade",
        "rule": {**JUDGING, "name": "quick", "model": model(folders["grader"])},
        "judge": critique_of(folders, "offload"),
        "pass_above": 4.5,
    }
    with runner_of(given) as runner:
        offloaded = runner.collect(GROUPS)
    assert loads == ["grader", "kind"]
    assert CENSUS.most_offloaded == 1
    resident = json.loads(json.dumps(given).replace('"offload"', '"resident"'))
    with runner_of(resident) as runner:
        kept = runner.collect(GROUPS)
    assert [values(one) for one in offloaded] == [pytest.approx(values(one), abs=1e-5) for one in kept]
