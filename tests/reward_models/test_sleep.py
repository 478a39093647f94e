"""Launched servers that sleep while the trainer computes: woken before they are called, by one process or several."""

import asyncio
import itertools
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from plaudit.errors import RecipeError
from plaudit.recipe import ScoreRecipe
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models import launch
from plaudit.reward_models.backend import GenerationRequest, SamplingParams
from plaudit.reward_models.launch import LaunchedModel
from plaudit.rewards.runner import RewardRunner
from plaudit.servers.server_command import INSIDE
from support.processes import gone
from support.recipes import rl_recipe, train_rl, write_recipe
from support.rewards import group
from support.servers import events, launched, length_judge, starts

SLEEP, WAKE, CALL = "/sleep?level=1", "/wake_up", "/v1/chat/completions"


def use(server: LaunchedModel, work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        try:
            await server.open()
            return await work()
        finally:
            await server.close()

    return asyncio.run(run())


async def call(server: LaunchedModel, *contents: str, timeout_s: float = 120.0) -> list[str | None]:
    """The text of each answer, after the server's pid; None for failures."""
    requests = [GenerationRequest([{"role": "user", "content": content}]) for content in contents]
    answers = await server.generate(requests, SamplingParams(16, timeout_s=timeout_s))
    return [answer.text and answer.text.split(" ", 1)[1] for answer in answers]


# Sleeping and waking -------------------------------------------------------------------------------------------------


def test_it_sleeps_and_wakes(program):
    server = launched(program, sleep=True)

    async def work() -> None:
        assert await call(server, "a") == ["a"]
        await server.load()  # it is awake
        await server.unload()
        await server.unload()
        await server.load()
        assert await call(server, "b") == ["b"]
        await server.unload()

    use(server, work)
    assert events(program) == [CALL, SLEEP, WAKE, CALL, SLEEP]
    [start] = starts(program)
    assert "--enable-sleep-mode" in start["arguments"]
    assert start["dev_mode"] == "1"
    assert gone(start["pid"])  # closed while it was asleep


def test_one_that_does_not_sleep_is_never_put_to_sleep(program):
    server = launched(program)

    async def work() -> None:
        await server.unload()
        await server.load()
        assert await call(server, "a") == ["a"]

    use(server, work)
    assert events(program) == [CALL]
    [start] = starts(program)
    assert not {"--enable-sleep-mode", "--middleware"} & set(start["arguments"])
    assert start["dev_mode"] is None


def test_only_we_can_put_it_to_sleep(program, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server = launched(program, sleep=True)

    def try_to_put_to_sleep() -> int:
        url = f"http://127.0.0.1:{server.port}{SLEEP}"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, b"{}"))
        return refused.value.code

    async def work() -> None:
        assert await asyncio.to_thread(try_to_put_to_sleep) == 401
        assert await call(server, "a") == ["a"]

    use(server, work)
    key = server._environment["PLAUDIT_SERVER_TOKEN"]
    assert len(key) == 64
    assert key not in str(starts(program))  # nor on its command line, which everybody can read
    assert server._environment["VLLM_API_KEY"] == key


def test_the_users_key_is_used_if_there_is_one(program, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-the-user")
    server = launched(program, sleep=True)
    assert use(server, lambda: call(server, "a")) == ["a"]
    assert server._environment["PLAUDIT_SERVER_TOKEN"] == "a-key-of-the-user"


def test_calls_while_it_sleeps_wake_it_once(program):
    server = launched(program, "--switch-takes 0.3", sleep=True)

    async def work() -> list[list[str | None]]:
        await server.unload()
        return await asyncio.gather(*(call(server, f"{i}") for i in range(5)), server.load())

    assert use(server, work)[:5] == [[f"{i}"] for i in range(5)]
    assert events(program) == [SLEEP, WAKE, *[CALL] * 5]


def test_a_call_while_it_falls_asleep_waits_and_wakes_it(program):
    server = launched(program, "--switch-takes 0.3", sleep=True)

    async def work() -> list[str | None]:
        falling_asleep = asyncio.create_task(server.unload())
        await asyncio.sleep(0.1)
        answers = await call(server, "a")
        await falling_asleep
        return answers

    assert use(server, work) == ["a"]
    assert events(program) == [SLEEP, WAKE, CALL]


def test_it_sleeps_once_its_calls_are_answered(program):
    server = launched(program, "--answer-takes 0.3", sleep=True)

    async def work() -> list[str | None]:
        calling = asyncio.create_task(call(server, "a", "b"))
        await asyncio.sleep(0.1)
        await server.unload()
        assert calling.done()
        return await calling

    assert use(server, work) == ["a", "b"]
    assert events(program) == [CALL, CALL, SLEEP]


def test_a_cancelled_caller_does_not_cancel_the_wake(program):
    server = launched(program, "--switch-takes 0.3", sleep=True)

    async def work() -> list[str | None]:
        await server.unload()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call(server, "a"), 0.05)
        return await call(server, "b")

    assert use(server, work) == ["b"]
    assert events(program) == [SLEEP, WAKE, CALL]


def test_where_it_cannot_sleep_the_error_says_so(program):
    server = launched(program, "--no-gpu", sleep=True)
    with pytest.raises(RecipeError, match=r"It can sleep on a GPU only: leave out model\.sleep"):
        use(server, lambda: call(server, "a"))


# Faults --------------------------------------------------------------------------------------------------------------


def test_one_that_dies_asleep_is_restarted_when_it_is_woken(program, tmp_path, capsys):
    server = launched(program, f"--dies-asleep {tmp_path / 'died'}", sleep=True)

    async def work() -> list[str | None]:
        await server.unload()
        await asyncio.sleep(0.2)
        assert len(starts(program)) == 1  # its memory stays free until it is needed
        await server.load()
        assert len(starts(program)) == 2
        answers = await call(server, "a")
        await server.unload()
        return answers

    assert use(server, work) == ["a"]
    assert events(program) == [SLEEP, CALL, SLEEP]  # one that was just started is awake
    assert "the server for models/judge died (exit code 9" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("argument", "limit_s", "problem"),
    [
        ("--never-sleeps {}", 10.0, "did not go to sleep (HTTP 500, 'busy'): stopping it, so that its GPU memory is free"),
        ("--switch-takes 30", 0.2, "did not go to sleep (no answer within limits.sleep_timeout_s, 0.2 s): stopping it"),
    ],
    ids=["refuses", "hangs"],
)
def test_one_that_does_not_fall_asleep_is_stopped_and_restarted_when_it_is_needed(
    program, tmp_path, capsys, argument, limit_s, problem
):
    limits = ModelLimits(sleep_timeout_s=limit_s)
    server = launched(program, argument.format(tmp_path / "refused"), sleep=True, limits=limits)

    async def work() -> list[str | None]:
        await server.unload()
        [start] = starts(program)
        assert gone(start["pid"])
        return await call(server, "a")

    assert use(server, work) == ["a"]
    assert events(program) == [SLEEP, CALL]
    output = " ".join(capsys.readouterr().err.split())
    assert problem in output, output


def test_one_that_cannot_be_woken_is_restarted(program, tmp_path, capsys):
    server = launched(program, f"--never-wakes {tmp_path / 'refused'}", sleep=True)

    async def work() -> list[str | None]:
        await server.unload()
        return await call(server, "a")

    assert use(server, work) == ["a"]
    assert events(program) == [SLEEP, WAKE, CALL]
    assert "could not be woken (HTTP 500, 'CUDA out of memory'): starting it again" in " ".join(capsys.readouterr().err.split())


def test_calls_fail_with_the_reason_if_it_cannot_be_woken_or_restarted(program, tmp_path):
    limits = ModelLimits(restarts=0)
    server = launched(program, f"--never-wakes {tmp_path / 'refused'}", sleep=True, limits=limits)

    async def work() -> Any:
        await server.unload()
        await server.load()
        [answer] = await server.generate([GenerationRequest([{"role": "user", "content": "a"}])], SamplingParams(16))
        await server.unload()
        return answer.failure

    failure = use(server, work)
    assert failure.cause == "server_died"
    assert "could not be woken (HTTP 500, 'CUDA out of memory'), and was started again 0 times before (limits.restarts)" in (
        failure.message
    )
    assert gone(starts(program)[0]["pid"])


def test_a_silent_server_is_restarted_and_its_calls_are_repeated(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "PROBE_S", 0.3)
    server = launched(program, f"--silent {tmp_path / 'silent'}", limits=ModelLimits(retries=0))

    async def work() -> list[list[str | None]]:
        return await asyncio.gather(*(call(server, letter, timeout_s=3.0) for letter in "abc"))

    assert use(server, work) == [["a"], ["b"], ["c"]]
    assert len(starts(program)) == 2
    assert "is alive but silent" in " ".join(capsys.readouterr().err.split())
    assert server.usage.calls == 3 + server.usage.retries == 6
    assert not any(server.usage.failures.values())


def test_a_slow_server_is_not_restarted(program):
    server = launched(program, "--slow", limits=ModelLimits(retries=0))
    assert use(server, lambda: call(server, "a", "b", timeout_s=0.5)) == [None, None]
    assert server.usage.failures == {"timeout": 2}
    assert len(starts(program)) == 1
    assert events(program) == [CALL, CALL, "/v1/completions"]


# With a runner -------------------------------------------------------------------------------------------------------


def test_a_runner_wakes_it_before_it_samples_and_rests_when_told(program):
    [reward] = ScoreRecipe.model_validate({"rewards": [length_judge(program, sleep=True)]}).rewards
    seen: list[list[str]] = []

    def sampled() -> Any:
        seen.append(events(program) if seen else [])
        yield group("four", "sixsix")

    with RewardRunner([reward]) as runner:
        for _ in range(2):
            [scored] = runner.collect(sampled())
            assert [score.value for score in scored.scores] == [4.0, 6.0]
            assert runner.rest() > 0
        runner.collect(sampled(), training=False)  # a validation
        runner.collect(sampled())
    assert events(program) == [CALL, CALL, SLEEP, WAKE, CALL, CALL, SLEEP, WAKE, *[CALL] * 4]
    assert [one[-1:] for one in seen] == [[], [WAKE], [WAKE], [CALL]]


def test_a_runner_without_such_models_has_nothing_to_give_back(program):
    [reward] = ScoreRecipe.model_validate({"rewards": [length_judge(program)]}).rewards
    with RewardRunner([reward]) as runner:
        runner.collect([group("four")])
        assert not runner.rests
        assert runner.rest() == runner.loaded_s == 0.0
    assert events(program) == [CALL]


@pytest.mark.slow
def test_a_run_rests_it_while_it_trains(program, tmp_path, tiny_model, prompts_file):
    reward = length_judge(program, sleep=True)
    validation = {"data": {"val": str(prompts_file)}, "validation": {"max_prompts": 1}}
    tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward, run={"validate_every": 1}, **validation)
    train_rl(write_recipe(tmp_path / "recipe.yaml", tree))
    order = [path for path, _ in itertools.groupby(events(program))]
    # Step 1 after a validation, step 2, each with a validation after it.
    assert order == [CALL, SLEEP, WAKE, CALL, SLEEP, WAKE, CALL]
    for line in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()):
        assert ("time/judge_sleep_s" in line and "time/judge_wake_s" in line) == (line["step"] > 0)
    assert gone(starts(program)[0]["pid"])


# SGLang --------------------------------------------------------------------------------------------------------------


def test_sglang_is_launched_and_sleeps(program, tmp_path):
    server = launched(program, f"--busy {tmp_path / 'busy'}", dialect="sglang", sleep=True, tokenizer=None, dtype="bfloat16")

    async def work() -> list[str | None]:
        answers = await call(server, "a")
        await server.unload()
        return answers + await call(server, "b")

    assert use(server, work) == ["a", "b"]
    sleep = ["/abort_request", "/flush_cache", "/flush_cache", "/release_memory_occupation"]
    assert events(program) == [CALL, *sleep, "/resume_memory_occupation", CALL]
    words = starts(program)[0]["arguments"]
    assert words[:2] == ["--model-path", "models/judge"]
    assert words[6:10] == ["--dtype", "bfloat16", "--enable-memory-saver", "--enable-weights-cpu-backup"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, [sys.executable, "-m", "sglang.launch_server", "--model-path", "m"]),
        ({"program": "env A=1 python3"}, ["env", "A=1", "python3", "-m", "sglang.launch_server", "--model-path", "m"]),
        ({"program": "./start.sh"}, ["./start.sh", "--model-path", "m"]),
    ],
)
def test_which_sglang_is_started(settings, words):
    model = RewardModel.model_validate({"placement": "launch", "dialect": "sglang", "path": "m", **settings})
    command = LaunchedModel(model).command
    assert command[: len(words)] == words
    assert "--is-embedding" not in command
    assert "--is-embedding" in LaunchedModel(model, scalar=True).command


def test_sglang_gets_its_key_in_a_file_that_only_we_can_read(program, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server = launched(program, dialect="sglang", sleep=True)

    async def work() -> Path:
        option, file = server._key_arguments
        assert option == "--config"
        assert re.fullmatch(r'api-key: "[0-9a-f]{64}"\n', Path(file).read_text())
        assert Path(file).stat().st_mode & 0o077 == 0
        assert {option, file} <= set(starts(program)[0]["arguments"])
        return Path(file)

    assert not use(server, work).parent.exists()


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"placement": "server", "url": "http://h:1", "sleep": True},
            "port and sleep belong to placement: launch",
        ),
        ({"placement": "offload", "sleep": True}, "sleep belong to placement: launch"),
        ({"placement": "launch", "dialect": "openai"}, "placement: launch starts vLLM or SGLang"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        RewardModel.model_validate({"path": "models/judge", **settings})


@pytest.mark.parametrize(
    ("model", "limits", "problem"),
    [
        ({"placement": "server", "url": "http://h:1"}, {"restarts": 1}, "limits.restarts belongs to placement: launch"),
        ({"placement": "resident"}, {"sleep_timeout_s": 1}, "limits.sleep_timeout_s belongs to placement: launch"),
        ({"placement": "launch"}, {"sleep_timeout_s": 1}, "limits.sleep_timeout_s has no effect without model.sleep"),
    ],
)
def test_limits_of_other_placements_are_refused(model, limits, problem):
    reward = {"kind": "judge", "model": {"path": "models/judge", **model}, "limits": limits}
    with pytest.raises(ValidationError, match=problem):
        ScoreRecipe.model_validate({"rewards": [reward]})


# The gate ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "path", "header", "answer"),
    [
        ("http", "/health", None, "passed on"),
        ("lifespan", "", None, "passed on"),
        ("http", "/sleep", None, 401),
        ("http", "/v1/models", b"Bearer wrong", 401),
        ("http", "/sleep", b"Bearer the-key", "passed on"),
        ("websocket", "/v1/realtime", b"Bearer the-key", "closed"),
    ],
)
def test_the_gate_passes_on_what_has_the_key(monkeypatch, kind, path, header, answer):
    monkeypatch.syspath_prepend(str(INSIDE))
    monkeypatch.setenv("PLAUDIT_SERVER_TOKEN", "the-key")
    from plaudit_gate import KeyGate  # pyright: ignore[reportMissingImports]

    found: list[Any] = []

    async def app(*_: Any) -> None:
        found.append("passed on")

    async def send(message: dict[str, Any]) -> None:
        found.append(message.get("status") or ("closed" if message["type"] == "websocket.close" else "body"))

    scope = {"type": kind, "path": path, "headers": [] if header is None else [(b"authorization", header)]}
    asyncio.run(KeyGate(app)(scope, None, send))  # pyright: ignore
    assert found[0] == answer
