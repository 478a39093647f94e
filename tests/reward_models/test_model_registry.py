"""Several reward models in one run: which rewards share a model, which model is on the device when, what they cost, and what
happens to a run whose judge dies. The models are real but tiny, on the CPU; the servers are real HTTP servers."""

import asyncio
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from aiohttp import web
from safetensors.torch import load_file, save_file

from plaudit.data.rows import read_rows
from plaudit.errors import RecipeError
from plaudit.models.weights import RESIDENT_MODELS
from plaudit.recipe import ScoreRecipe
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import GenerationRequest, SamplingParams
from plaudit.reward_models.local import LocalModel
from plaudit.rewards.cache import reward_digest
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Group, ScoredGroup
from support.fault_server import FaultServer
from support.recipes import rl_recipe, train_rl, write_recipe
from support.rewards import group, values
from support.rows import prompt_rows, write_jsonl

GROUPS = [group(f"{i} apples", f"It is {i + 2}.", "no", id=f"p{i}", truth=str(i)) for i in range(3)]
PLUGIN = dedent("""
    def rm_preprocess(text_prompts, text_responses, tgt_tokenizer):
        return [f"{prompt} {response}\\nPoints:" for prompt, response in zip(text_prompts, text_responses)]

    def rm_postprocess(results):
        return [float(result) / 9 for result in results]
""")


def model(folder: Path, placement: str = "offload", **settings) -> dict[str, Any]:
    return {"path": str(folder), "placement": placement, "device": "cpu", **settings}


JUDGING = {"kind": "judge", "sampling": {"max_new_tokens": 4}, "limits": {"unreadable_retries": 0}}


def runner_of(*rewards: dict[str, Any], **settings) -> RewardRunner:
    return RewardRunner(ScoreRecipe.model_validate({"rewards": rewards}).rewards, **settings)


def by_reward(scored: list[ScoredGroup]) -> dict[str, list[float | None]]:
    return {name: [score.value for one in scored for score in one.by_reward[name]] for name in scored[0].by_reward}


# Sharing a model -----------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_opened_is_reported_with_its_reward():
    with FaultServer() as server:
        server.others = ["embedder"]
        reward = {"kind": "judge", "name": "helpful", "model": {"placement": "server", "url": server.url}}
        with pytest.raises(RecipeError, match=r"^reward 'helpful': http.*/v1/models: it serves several models; set model\.path to"):
            runner_of(reward).__enter__()


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
    assert loads == ["kind", "grader"] * 2, "each once per scoring phase"
    assert RESIDENT_MODELS.max_offloaded == 1
    assert RESIDENT_MODELS.models() == []
    for name, found in first.items():  # how requests meet in batches depends on timing, and with it the last bits
        assert found == pytest.approx(second[name], abs=1e-6)
    assert first["all"] == pytest.approx(first["line"], abs=1e-5)
    assert first["grade"] == first["again"]
    assert len(set(first["grade"])) > 1
    calls = {name: counts[f"judge/{name}/calls"] for name in ("kind", "kind/all", "kind/line", "grader", "grader/again")}
    assert calls == {"kind": 36, "kind/all": 18, "kind/line": 18, "grader": 36, "grader/again": 18}
    assert counts["judge/calls"] == 72
    assert counts["judge/grader/new_tokens"] == counts["judge/new_tokens"] == 36 * 2
    assert counts["judge/kind/all/prompt_tokens"] + counts["judge/kind/line/prompt_tokens"] == counts["judge/kind/prompt_tokens"]


def test_a_resident_model_is_loaded_once_until_the_last_reward_closes(folders, loads):
    critique = {"kind": "critique_then_score", "model": model(folders["grader"], "resident"), "sampling": {"max_new_tokens": 4}}
    rewards = [
        {**JUDGING, "model": model(folders["grader"], "resident")},
        {**critique, "scorer": {**JUDGING, "model": model(folders["grader"], "resident")}},
    ]
    with runner_of(*rewards) as runner:
        assert [Path(alive.name).name for alive in RESIDENT_MODELS.models()] == ["grader"]
        runner.collect(GROUPS)
        [judge, *_] = runner.live
        asyncio.run_coroutine_threadsafe(judge.close(), runner._loop).result()
        assert len(RESIDENT_MODELS.models()) == 1, "the other reward still uses it"
    assert RESIDENT_MODELS.models() == []
    assert loads == ["grader"]


@pytest.mark.grid(1)
@pytest.mark.parametrize("with_critique", [False, True], ids=["scalar_model", "critique_then_score"])
@pytest.mark.parametrize("placement", ["resident", "offload"])
def test_repeatable_scores_do_not_depend_on_the_batch(folders, tmp_path, placement, with_critique):
    """Bitwise: whatever else is pending, and whatever part of a group is cached from another with the same prompt."""
    reward = {"kind": "scalar_model", "model": model(folders["kind"], placement)}
    if with_critique:
        critic = {"model": model(folders["grader"], placement), "sampling": {"max_new_tokens": 4}}
        reward = {"kind": "critique_then_score", **critic, "scorer": reward}
    responses = [f"{i} and {3 * i}, which makes {4 * i}." * (1 + i % 3) for i in range(12)]
    ours = group(*responses[4:9], responses[4], id="ours")
    others = [group(*responses[i : i + 6], id=f"beside {i}") for i in range(7)]  # the same prompt, and some of the same responses

    def scores(name: str, *steps: list[Group]) -> list[float | None]:
        with runner_of(reward, cache=tmp_path / name, repeatable=True) as runner:
            found = [runner.collect(step)[-1] for step in steps]
        return [score.value for score in found[-1].scores]

    alone = scores("alone", [ours])
    assert len(set(alone)) == 5
    assert scores("with others", [*others, ours]) == alone
    assert scores("after others", others, [ours]) == alone
    assert scores("alone", [ours]) == alone, "now from the cache"


def test_models_with_different_settings_are_not_shared(folders, loads):
    first = {"kind": "scalar_model", "name": "first", "model": model(folders["kind"], "resident")}
    second = {**first, "name": "second", "model": model(folders["kind"], "resident", max_prompt_tokens=8)}
    with runner_of(first, second) as runner:
        runner.collect(GROUPS)
        counts = runner.counts()
    assert loads == ["kind", "kind"]
    assert {name for name in counts if name.endswith("calls")} == {"judge/calls", "judge/kind/calls", "judge/kind-2/calls"}


def test_a_model_that_cannot_be_opened_is_reported_once(tmp_path):
    nowhere = model(tmp_path / "none", "resident")
    with pytest.raises(RecipeError, match="no such folder") as caught:
        runner_of({**JUDGING, "name": "a", "model": nowhere}, {**JUDGING, "name": "b", "model": nowhere}).__enter__()
    assert str(caught.value).count("no such folder") == 1


# One model at a time -------------------------------------------------------------------------------------------------


def critique_of(folders: dict[str, Path], placement: str) -> dict[str, Any]:
    return {
        "kind": "critique_then_score",
        "model": model(folders["grader"], placement),
        "sampling": {"max_new_tokens": 4},
        "scorer": {"kind": "scalar_model", "model": model(folders["kind"], placement)},
    }


@pytest.mark.parametrize("limits", [{}, {"max_concurrent_groups": 1}])
def test_all_critiques_are_written_before_the_scorer_is_loaded(folders, loads, tmp_path, limits):
    reward = {**critique_of(folders, "offload"), "limits": limits}
    with runner_of(reward, cache=tmp_path / "scores.sqlite") as runner:
        offloaded = runner.collect(GROUPS)
        assert loads == ["grader", "kind"]
        assert by_reward(runner.collect(GROUPS)) == by_reward(offloaded), "from the cache"
        counts = runner.counts()
    assert (counts["judge/grader/calls"], counts["judge/kind/calls"]) == (9, 9)
    assert RESIDENT_MODELS.max_offloaded == 1
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
    assert loads.index("grader") < loads.index("kind"), "a model for two rewards is loaded when both need it"
    assert RESIDENT_MODELS.max_offloaded == 1


def test_a_failing_critic_fails_its_samples(folders, loads):
    sampling = {"max_new_tokens": 2048}  # the full context: no room for a prompt
    limits = {"unreadable_retries": 0, "group_retries": 1, "group_backoff_s": 0.0}
    reward = critique_of(folders, "offload") | {"sampling": sampling, "limits": limits}
    with runner_of(reward, tolerant=True) as runner:
        scored = runner.collect(GROUPS)
        counts = runner.counts()
    causes = {score.failure.cause for one in scored for score in one.by_reward["critique_then_score"] if score.failure}
    assert causes == {"context"}
    assert counts["retries/critique_then_score"] == 9, "while the critic is loaded"
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
    assert RESIDENT_MODELS.max_offloaded == 1
    resident = json.loads(json.dumps(given).replace('"offload"', '"resident"'))
    with runner_of(resident) as runner:
        kept = runner.collect(GROUPS)
    assert [values(one) for one in offloaded] == [pytest.approx(values(one), abs=1e-5) for one in kept]


# Cached scores -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scalar_model", "critique_then_score", "cascade"])
def test_scores_of_an_overwritten_model_are_not_reused(folders, tiny_models, tmp_path, kind):
    folder = shutil.copytree(folders["kind"], tmp_path / "rm")
    scalar = {"kind": "scalar_model", "model": model(folder, "resident")}
    reward = {
        "scalar_model": scalar,
        "critique_then_score": {**critique_of(folders, "resident"), "scorer": scalar},
        "cascade": {"kind": "cascade", "mode": "only", "judge": scalar},
    }[kind]

    def scores() -> tuple[list[float | None], float]:
        with runner_of(reward, cache=tmp_path / "scores.sqlite") as runner:
            return by_reward(runner.collect(GROUPS))[kind], runner.counts()["judge/rm/calls"]

    first, again = scores(), scores()
    assert again[0] == first[0]
    assert (first[1], again[1]) == (9, 0), "from the cache"
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = -weights["score.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    changed, calls = scores()
    assert calls == 9
    assert changed != pytest.approx(first[0])


def test_a_model_is_identified_by_its_files_and_settings(folders, tmp_path):
    folder, digests = shutil.copytree(folders["kind"], tmp_path / "rm"), []

    def digest(path: Path | str, **settings) -> str:
        limits = settings.pop("limits", {})
        given = {"kind": "scalar_model", "model": {"path": str(path), "device": "cpu", **settings}, "limits": limits}
        [reward] = ScoreRecipe.model_validate({"rewards": [given]}).rewards
        return reward_digest(reward)

    digests.append(digest(folder))
    assert digest(shutil.copytree(folder, tmp_path / "moved")) == digests[0], "not by its path"
    for name in ("chat_template.jinja", "tokenizer_config.json", "config.json"):
        (folder / name).write_text((folder / name).read_text() + " ")
        digests.append(digest(folder))
    (folder / "README.md").write_text("new")
    assert digest(folder) == digests[-1]
    large = folder / "model-00002-of-00002.safetensors"
    large.write_bytes(bytes(3 << 20))
    digests.append(digest(folder))
    os.utime(large, ns=(1, 1))
    digests.append(digest(folder))
    assert len(set(digests)) == len(digests)
    server = {"placement": "server", "url": "http://a:1"}
    assert digest(folder, **server) == digest(
        folder, **server | {"url": "http://b:2", "limits": {"max_concurrent_calls": 2}, "prompt_price": 1.0}
    )
    before = digest("judge", **server, tokenizer=str(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    assert digest("judge", **server, tokenizer=str(folder)) != before, "conversations are rendered with it in this process"


def test_a_served_model_is_identified_by_its_name_on_the_server(tmp_path):
    def requests(name: str) -> int:
        with Grader(model=name) as server:
            reward = {**JUDGING, "model": {"placement": "server", "url": server.url}}
            with runner_of(reward, cache=tmp_path / "scores.sqlite") as runner:
                runner.collect(GROUPS)
            return len(server.requests)

    assert [requests(name) for name in ("judge-1", "judge-1", "judge-2")] == [9, 0, 9]


# Cost ----------------------------------------------------------------------------------------------------------------


class Grader(FaultServer):
    """Answers with a digit."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.answered: list[str] = []

    def _good(self, path: str, body: dict[str, Any], content: str) -> dict[str, Any]:
        self.answered.append(content)
        choice = {"message": {"role": "assistant", "content": str(sum(content.encode()) % 10)}}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return {"choices": [{"index": 0, "finish_reason": "stop", **choice}], "usage": usage}


def test_calls_retries_tokens_and_cost_are_reported(tmp_path, plaudit):
    rows = [{"prompt": f"{i}?", "response": "503:1 times"} for i in range(5)]
    template = tmp_path / "prompt.jinja"
    template.write_text("{{ response }} {{ question }}")
    with Grader() as server:
        served = {
            "placement": "server",
            "url": server.url,
            "prompt_price": 2.0,
            "answer_price": 20.0,
        }
        limits = {"unreadable_retries": 0, "retries": 2, "backoff_s": 0.001}
        reward = {**JUDGING, "template": str(template), "model": served, "limits": limits}
        rewards = [{**reward, "name": name} for name in ("first", "second")]
        with runner_of(*rewards) as runner:
            for i in range(2):
                runner.collect([group("503:1 times", id=f"{i}")])
            counts = runner.counts()
            assert runner.counts()["judge/calls"] == 0.0
        assert counts["judge/judge/calls"] == counts["judge/judge/first/calls"] + counts["judge/judge/second/calls"] + 1
        assert counts["judge/judge/retries"] == 1
        assert counts["judge/cost"] == pytest.approx(4 * (100 * 2.0 + 10 * 20.0) / 1e6)
        assert counts["judge/judge/first/cost"] == pytest.approx(counts["judge/cost"] / 2)
        file = write_recipe(tmp_path / "r.yaml", {"rewards": rewards[:1]})
        write_jsonl(tmp_path / "rows.jsonl", rows)
        code, out, _ = plaudit("score", file, tmp_path / "rows.jsonl", "--out", tmp_path / "out.jsonl")
    assert code == 0
    assert "judge: 10 calls (5 retries), 500 + 50 tokens, cost 0.002" in " ".join(out.split())


# A judge that dies ---------------------------------------------------------------------------------------------------


def metrics_of(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "judge/"))} for row in rows]


@pytest.mark.grid(1)
@pytest.mark.parametrize("concurrency", [1, 64])
def test_a_run_whose_judge_dies_stops_with_one_line_and_can_resume(tmp_path, tiny_model, plaudit, monkeypatch, concurrency):
    monkeypatch.chdir(tmp_path)  # prompt ids contain the file, so sampling depends on it
    prompts = write_jsonl(Path("prompts.jsonl"), prompt_rows())

    def recipe(name: str, server: Grader) -> Path:
        served = {"placement": "server", "url": server.url}
        calls = {"max_concurrent_groups": concurrency, "max_concurrent_calls": concurrency}
        reward = {**JUDGING, "model": served, "limits": {**calls, "unreadable_retries": 0, "retries": 1, "backoff_s": 0.05}}
        tree = rl_recipe(tiny_model, prompts, tmp_path / name, reward, run={"max_steps": 3})
        return write_recipe(tmp_path / f"{name}.yaml", tree)

    with Grader() as server:
        train_rl(recipe("uninterrupted", server))
        uninterrupted = Counter(server.answered)
    with Grader() as server:
        server.dies_after = len(uninterrupted) // 2 + 1  # in the second step
        file = recipe("run", server)
        began = time.monotonic()
        code, _, err = plaudit("rl", file)
        assert time.monotonic() - began < 100.0, "nothing waits for the answer timeout of 120 s"
        assert code == 2
        stopped = [line for line in err.splitlines() if "reward 'judge' failed" in line]
        assert len(stopped) == 1
        assert err.splitlines()[-1] == stopped[0]
        assert re.search(r"^step 2: reward 'judge' failed on at least \d+ of 12 samples .*nothing listens there", stopped[0])
        assert "max_failure_rate is 0.1" in stopped[0]
        assert "run the same command to resume" in stopped[0]
        assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["step_000001"]
        code, _, err = plaudit("rl", file)
        assert (code, "nothing listens there" in err) == (2, True), "still dead, and reported before anything is sampled"
        before, server.dies_after = len(server.answered), None
        assert 12 < before < uninterrupted.total()
        server.live()
        assert plaudit("rl", file, "rewards.0.limits.retries=3", "rewards.0.model.prompt_price=1")[0] == 0
        # Calls in flight for a group without any score may be repeated; scored samples are not.
        assert set(server.answered) == set(uninterrupted)
        assert len(server.answered) - before <= uninterrupted.total() - 12
        assert concurrency > 1 or Counter(server.answered) == uninterrupted, "nothing is scored twice"
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "uninterrupted")
    last = (tmp_path / name / "model/model.safetensors" for name in ("run", "uninterrupted"))
    assert len({file.read_bytes() for file in last}) == 1


# All kinds of rewards together ---------------------------------------------------------------------------------------


class ModelServer:
    """An OpenAI-compatible server in a thread, whose model is one of ours: `with ModelServer(folder, scalar=True) as url`."""

    def __init__(self, folder: Path, *, scalar: bool):
        self.name = folder.name
        self._model = LocalModel(RewardModel(path=str(folder), device="cpu"), scalar=scalar)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return self._do(self._start())

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> str:
        await self._model.open()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/classify", self._classify)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._model.close()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name, "max_model_len": 2048}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        question = GenerationRequest(body.get("messages", []), body.get("prompt"))
        [answer] = await self._model.generate([question], SamplingParams(body["max_tokens"], body["temperature"], body["top_p"]))
        reply = {"message": {"role": "assistant", "content": answer.text}, "text": answer.text}
        reason = "length" if answer.truncated else "stop"
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.new_tokens}
        return web.json_response({"choices": [{"index": 0, "finish_reason": reason, **reply}], "usage": usage})

    async def _classify(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["use_activation"] is False
        [verdict] = await self._model.score([body["messages"]])
        return web.json_response({"data": [{"probs": [verdict.value]}], "usage": {"prompt_tokens": verdict.prompt_tokens}})


@pytest.mark.slow
def test_models_judges_a_plugin_and_rules_in_one_run(folders, tiny_model, tmp_path, monkeypatch, loads):
    monkeypatch.chdir(tmp_path)
    rows = [{**row, "rm_prompt": f"Rate the answer to sum {i}:" if i % 2 else ""} for i, row in enumerate(prompt_rows())]
    prompts = write_jsonl(Path("prompts.jsonl"), rows)
    plugin = tmp_path / "rider_reward.py"
    plugin.write_text(PLUGIN)

    def run(name: str, models: dict[str, dict[str, Any]]) -> tuple[list[dict], list[dict]]:
        generation = {"sampling": {"max_new_tokens": 4}, "limits": {"unreadable_retries": 0}}
        tree = rl_recipe(tiny_model, prompts, tmp_path / name, {}, run={"max_steps": 2}, optim={"lr": 1e-4})
        tree["rewards"] = [
            {"kind": "scalar_model", "name": "kind", "model": models["kind"], "scale": 0.1},
            {"kind": "repetition", "weight": 0.5},
            {"kind": "scalar_model", "name": "short", "model": models["short"], "weight": 0.2},
            {"kind": "judge", "model": models["grader"], **generation, "scale": 0.1},
            {"kind": "plugin", "path": str(plugin), "model": models["rider"], **generation, "weight": 0.3},
            {"kind": "length", "unit": "characters", "at_least": 1, "at_most": 20, "slack": 20, "weight": 0.1},
        ]
        train_rl(write_recipe(tmp_path / f"{name}.yaml", tree))
        metrics = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        samples = [row for step in (1, 2) for row in read_rows(tmp_path / name / f"samples/train_{step:06d}.parquet")]
        return metrics, samples

    metrics, samples = run("offload", {name: model(folder) for name, folder in folders.items()})
    assert loads == ["kind", "short", "grader", "rider"] * 2
    assert RESIDENT_MODELS.max_offloaded == 1
    assert RESIDENT_MODELS.models() == []
    parts = ("kind", "short", "judge", "plugin", "repetition", "length")
    for row in metrics:
        assert {f"parts/{part}" for part in parts} <= set(row)
        assert row["dropped"] == row["judge/retries"] == 0
        assert {f"judge/{name}/calls" for name in folders} <= set(row)
        assert row["judge/calls"] == sum(row[f"judge/{name}/calls"] for name in folders)
    for part in ("kind", "short", "judge", "plugin"):
        assert len({sample[f"part/{part}"] for sample in samples}) > 1, f"{part} gives everything the same score"

    with ExitStack() as stack:
        served = {}
        for name, folder in folders.items():
            url = stack.enter_context(ModelServer(folder, scalar=name in ("kind", "short")))
            served[name] = {"placement": "server", "url": url, "path": name}
        _, others = run("server", served)
    assert [row["response"] for row in others] == [row["response"] for row in samples]
    for column in ("reward", *(f"part/{part}" for part in parts)):
        assert [row[column] for row in others] == pytest.approx([row[column] for row in samples], abs=1e-4), column
