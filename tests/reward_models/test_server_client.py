"""Judges behind URLs: faults are retried, counted and reported, and never affect the answers to other requests."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from plaudit.config import load
from plaudit.errors import PlauditError, RecipeError
from plaudit.recipe import ScoreRecipe
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models import rate_limit
from plaudit.reward_models.backend import Answer, GenerationRequest, SamplingParams, ScalarScore, Usage
from plaudit.reward_models.connection import fault_of
from plaudit.reward_models.replicas import Replica, Replicas
from plaudit.reward_models.server_client import ServerClient
from support.fault_server import FaultServer

QUICK = ModelLimits(backoff_s=0.001)
SERVED = {"placement": "server", "url": "http://a"}


@pytest.fixture
def server():
    with FaultServer() as one:
        yield one


def model(*servers: FaultServer | str, **settings) -> RewardModel:
    urls = [one if isinstance(one, str) else one.url for one in servers]
    return RewardModel.model_validate({"placement": "server", "url": urls, **settings})


def question(content: str, **fields) -> GenerationRequest:
    return GenerationRequest([{"role": "user", "content": content}], key=content, **fields)


def generate(
    settings: RewardModel, *contents: str, params: SamplingParams | None = None, limits: ModelLimits = QUICK
) -> tuple[list[Answer], Usage]:
    return send(settings, [question(content) for content in contents], params, limits)


def send(
    settings: RewardModel,
    requests: Sequence[GenerationRequest],
    params: SamplingParams | None = None,
    limits: ModelLimits = QUICK,
) -> tuple[list[Answer], Usage]:
    async def run() -> tuple[list[Answer], Usage]:
        client = ServerClient(settings, limits=limits)
        try:
            await client.open()
            return await client.generate(requests, params or SamplingParams(16)), client.usage
        finally:
            await client.close()

    return asyncio.run(run())


def score(settings: RewardModel, *answers: str, limits: ModelLimits = QUICK) -> list[ScalarScore]:
    async def run() -> list[ScalarScore]:
        client = ServerClient(settings, scalar=True, limits=limits)
        try:
            await client.open()
            return await client.score([conversation(answer) for answer in answers])
        finally:
            await client.close()

    return asyncio.run(run())


def conversation(answer: str) -> list[dict]:
    return [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": answer}]


def cause(result: Answer | ScalarScore) -> str | None:
    return None if result.failure is None else result.failure.cause


def check_counts(usage: Usage, questions: int) -> None:
    assert usage.calls == questions + usage.retries
    assert sum(usage.faults.values()) == usage.retries + sum(usage.failures.values())


# Requests and answers ------------------------------------------------------------------------------------------------


def test_answers_come_in_order_with_token_counts(server):
    answers, usage = generate(model(server), "a", "long one", "ccc")
    assert [answer.text for answer in answers] == ["answer to a", "answer to long one", "answer to ccc"]
    assert [answer.truncated for answer in answers] == [False, True, False]
    assert [answer.prompt_tokens for answer in answers] == [1, 8, 3]
    assert (usage.calls, usage.retries, usage.prompt_tokens, usage.new_tokens, usage.failures) == (3, 0, 12, 6, {})


def test_request_bodies(server):
    send(model(server), [question("hi")], SamplingParams(7, temperature=0.5, top_p=0.9, seed=3, stop=("\n",)))
    send(model(server, dialect="openai"), [question("hi")], SamplingParams(7))
    send(model(server), [GenerationRequest([], text="<s>hi")], SamplingParams(7))
    chat, plain, ready = server.requests
    assert chat.path == "/v1/chat/completions"
    assert {**chat.body, "seed": 0} == {
        "model": "judge", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "temperature": 0.5, "top_p": 0.9,
        "seed": 0, "stop": ["\n"], "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert not {"top_k", "min_p", "repetition_penalty", "stop"} & set(plain.body)  # which other servers do not know
    assert (ready.path, ready.body["prompt"], ready.body["add_special_tokens"]) == ("/v1/completions", "<s>hi", False)


def test_the_same_key_and_seed_send_the_same_seed(server):
    for seed in (0, 0, 1):
        send(
            model(server),
            [question("a"), question("b")],
            SamplingParams(7, temperature=1.0, seed=seed),
            ModelLimits(max_concurrent_calls=1),
        )
    seeds = [request.body["seed"] for request in server.requests]
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_an_unpaired_surrogate_is_replaced(server):
    answers, _ = generate(model(server), "ä\ud800中")
    assert answers[0].text == "answer to ä?中"


def test_prompts_are_rendered_locally_if_the_recipe_names_a_tokenizer(server, tiny_model):
    from plaudit.data.templates import load_template, load_tokenizer

    template = load_template(load_tokenizer(str(tiny_model)), None)
    expected = template.prompt_tokens([{"role": "user", "content": "What is 1 + 2?"}])
    settings = model(server, tokenizer=str(tiny_model), max_prompt_tokens=len(expected))
    answers, usage = generate(settings, "What is 1 + 2?", "What is 1 + 2? And what is that?")
    assert [answer.too_long for answer in answers] == [False, True]
    assert [request.body["prompt"] for request in server.requests] == [expected]
    assert usage.calls == 1


def test_prompts_that_are_too_long_are_not_failures(server):
    answers, usage = generate(model(server, max_prompt_tokens=8), "toolong", "more than eight", "short")
    assert [(answer.too_long, answer.text, answer.failure) for answer in answers[:2]] == [(True, None, None)] * 2
    assert answers[2].text == "answer to short"
    assert (usage.failures, usage.retries) == ({}, 0)


def test_no_room_for_any_prompt_is_not_reported_as_a_long_prompt(server):
    server.max_model_len = 16
    [answer], _ = generate(model(server), "toolong", params=SamplingParams(16))
    assert (cause(answer), answer.too_long, server.requests) == ("context", False, [])


# Scalar models -------------------------------------------------------------------------------------------------------


def test_vllm_scalar_models_get_tokens_of_their_own_template(server, tiny_model):
    from plaudit.data.templates import load_template, load_tokenizer

    template = load_template(load_tokenizer(str(tiny_model)), None)
    verdicts = score(model(server, tokenizer=str(tiny_model)), "3", "4")
    probe, *requests = server.requests
    assert probe.path == "/classify"
    for one, answer in zip(requests, "34", strict=True):
        ids = one.body["input"]
        assert template.tokenizer.decode(ids) == template.render(conversation(answer))  # with one BOS token, if it has any
        assert one.body["use_activation"] is False
    assert [verdict.value for verdict in verdicts] == [len(" ".join(map(str, one.body["input"]))) / 4 for one in requests]


def test_sglang_scalar_models(server, tiny_model):
    verdicts = score(model(server, tokenizer=str(tiny_model), dialect="sglang"), "3")
    ids = server.requests[-1].body["input_ids"]
    assert verdicts[0].value == len(" ".join(map(str, ids))) / 4


def test_without_a_tokenizer_vllm_renders_conversations(server, capsys):
    verdicts = score(model(server), "3", "toolong", "500:1 x", "nan", "notext")
    assert [verdict.value for verdict in verdicts] == [0.25, None, 1.75, None, None]
    assert [verdict.too_long for verdict in verdicts] == [False, True, False, False, False]
    assert [cause(verdict) for verdict in verdicts] == [None, None, None, "garbage", "garbage"]
    assert "renders the conversations instead" in capsys.readouterr().err


def test_an_unusable_scalar_model_is_reported_before_the_run(server, tiny_model):
    with pytest.raises(RecipeError, match="use dialect: vllm or sglang"):
        score(model(server, dialect="openai"), "3")
    with pytest.raises(RecipeError, match="set tokenizer to the model's folder"):
        score(model(server, dialect="sglang"), "3")
    server.fault_for_all = "notext"
    with pytest.raises(RecipeError, match="0 numbers instead of one"):
        score(model(server, tokenizer=str(tiny_model)), "3")


# Faults --------------------------------------------------------------------------------------------------------------

CAUSES = {"500": "http", "503": "http", "429": "http", "half": "half", "reset": "reset", "hang": "timeout", "notjson": "garbage",
          "schema": "garbage", "empty": "garbage", "notext": "garbage", "nan": "garbage"}  # fmt: skip


@pytest.mark.parametrize("fault", CAUSES)
def test_transient_faults_are_retried(server, fault):
    limits = ModelLimits(backoff_s=0.001, retries=2, attempt_timeout_s=1.5 if fault == "hang" else None)
    answers, usage = generate(model(server), f"{fault}:2 a", f"{fault} b", "c", limits=limits)
    assert [answer.text for answer in answers] == [f"answer to {fault}:2 a", None, "answer to c"]
    failure = answers[1].failure
    assert failure is not None
    assert failure.cause == CAUSES[fault]
    assert failure.message.startswith(f"{server.url}/v1/chat/completions: ")
    assert failure.message.endswith("(3 attempts)")
    assert (usage.calls, usage.retries, usage.failures) == (7, 4, {CAUSES[fault]: 1})
    check_counts(usage, 3)


def test_permanent_faults_are_not_retried(server):
    answers, usage = generate(model(server), "400 a", "b")
    assert [cause(answer) for answer in answers] == ["rejected", None]
    assert answers[0].failure is not None
    assert "temperature must not be negative" in answers[0].failure.message
    assert usage.calls == 2


def test_a_service_that_rejects_a_field_of_vllm_needs_another_dialect(server):
    [answer], _ = generate(model(server), "unknownfield a")
    assert answer.failure is not None
    assert answer.failure.message.endswith(
        "supplied: top_k'. The server does not know vLLM's settings: set model.dialect to openai in this reward."
    )


def test_a_rejected_key_ends_all_calls_at_once(server):
    """Calls in flight, those waiting for a retry or for a slot, and later ones: one message, and nothing more is sent."""

    async def run() -> tuple[list[Answer], list[Answer], Usage]:
        limits = ModelLimits(backoff_s=3600.0, max_concurrent_calls=4)
        client = ServerClient(model(server), limits=limits)
        await client.open()
        try:
            params = SamplingParams(16, timeout_s=10_000.0)
            others = asyncio.create_task(client.generate([question(c) for c in ("hang a", "500 b", "hang c")], params))
            while len(server.requests) < 3:
                await asyncio.sleep(0.01)
            rejected = await client.generate([question(c) for c in ("401 d", "e", "f")], params)
            later = await client.generate([question("g")], params)
            return [*rejected, *await others], later, client.usage
        finally:
            await client.close()

    answers, later, usage = asyncio.run(asyncio.wait_for(run(), 60))
    [message] = {answer.failure.message for answer in [*answers, *later] if answer.failure is not None}
    assert {cause(answer) for answer in [*answers, *later]} == {"unauthorised"}
    assert "invalid key" in message
    assert "set model.credential to the NAME" in message
    assert sorted(server.contents()) == ["401 d", "500 b", "hang a", "hang c"]
    check_counts(usage, 7)


def test_a_rejected_key_is_tried_again_after_a_while(server, monkeypatch):
    monkeypatch.setattr("plaudit.reward_models.connection.REJECTED_S", 0.0)
    one_by_one = ModelLimits(backoff_s=0.001, max_concurrent_calls=1)
    answers, usage = generate(model(server), "401:1 a", "b", limits=one_by_one)
    assert [cause(answer) for answer in answers] == ["unauthorised", None]
    check_counts(usage, 2)


def test_forbidden_means_a_wrong_key_only_until_a_call_is_answered(server, monkeypatch):
    monkeypatch.setenv("JUDGE_PASS", "velvet-hammer")
    one_by_one = ModelLimits(backoff_s=0.001, max_concurrent_calls=1)
    answers, _ = generate(model(server, credential="JUDGE_PASS"), "b", "403 c", limits=one_by_one)
    assert [cause(answer) for answer in answers] == [None, "rejected"]
    answers, _ = generate(model(server, credential="JUDGE_PASS"), "403 a", "b", limits=one_by_one)
    assert [cause(answer) for answer in answers] == ["unauthorised"] * 2
    assert answers[0].failure is not None
    assert "The key in JUDGE_PASS is not accepted" in answers[0].failure.message


def test_retry_after_is_respected():
    with FaultServer(retry_after="0.4") as server:
        began = time.monotonic()
        answers, _ = generate(model(server), "429:1 a")
        assert (answers[0].failure, time.monotonic() - began >= 0.4) == (None, True)
        server.retry_after = "3600"
        answers, usage = generate(model(server), "429:1 b")
    assert (cause(answers[0]), usage.retries) == ("http", 0)  # beyond the deadline, so it fails at once


def test_a_deadline_ends_all_attempts(server, monkeypatch):
    monkeypatch.setattr("plaudit.reward_models.connection.random.uniform", lambda low, high: high)  # attempts at 0, 0.3, 0.9, 2.1 s
    began = time.monotonic()
    answers, usage = generate(
        model(server),
        "hang a",
        "500 b",
        "c",
        params=SamplingParams(16, timeout_s=3.0),
        limits=ModelLimits(retries=1000, backoff_s=0.3),
    )
    assert time.monotonic() - began < 60
    assert [cause(answer) for answer in answers] == ["timeout", "http", None]
    check_counts(usage, 3)


def test_waiting_for_a_slot_does_not_count_towards_the_timeout():
    with FaultServer(latency_s=0.1) as server:
        answers, _ = generate(
            model(server), *"abcdefgh", params=SamplingParams(16, timeout_s=5.0), limits=ModelLimits(max_concurrent_calls=1)
        )
        assert [cause(answer) for answer in answers] == [None] * 8
        assert server.max_in_flight == 1


def test_concurrent_calls_reach_the_limit_but_not_more():
    with FaultServer(latency_s=0.3) as server:
        generate(model(server), *map(str, range(250)), limits=ModelLimits(max_concurrent_calls=120))
        assert 100 < server.max_in_flight <= 120  # aiohttp's own limit would be 100


def test_a_cancelled_request_leaves_no_calls_in_flight(server):
    async def run() -> int:
        client = ServerClient(model(server), limits=QUICK)
        await client.open()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.generate([question(f"hang {i}") for i in range(5)], SamplingParams(16))
        in_flight_calls = client._connection.replicas.all[0].in_flight
        await client.close()
        return in_flight_calls

    assert asyncio.run(run()) == 0


def test_errors_have_a_cause():
    key = aiohttp.client_reqrep.ConnectionKey("h", 1, False, None, None, None, None)  # pyright: ignore
    refused = aiohttp.ClientConnectorError(key, OSError(111, "Connection refused"))
    for error, expected in [
        (refused, "refused"), (aiohttp.ServerDisconnectedError(), "reset"), (ConnectionResetError(104, "reset"), "reset"),
        (aiohttp.ClientPayloadError("x"), "half"), (TimeoutError(), "timeout"), (aiohttp.ServerTimeoutError(), "timeout"),
        (aiohttp.InvalidURL("x"), "refused"), (OSError(24, "Too many open files"), "refused"),
    ]:  # fmt: skip
        assert fault_of(error, 1.0).cause == expected, error


# Opening -------------------------------------------------------------------------------------------------------------


def test_a_server_that_is_not_running(server):
    server.die()
    began = time.monotonic()
    with pytest.raises(RecipeError, match=rf"^{server.url}/v1/models: nothing listens there \(.*\)\. Is the server still running"):
        generate(model(server), "a")
    assert time.monotonic() - began < 60


def test_a_server_that_starts_later_is_waited_for(server):
    server.die()

    async def run() -> Answer:
        client = ServerClient(model(server), wait_s=30.0)
        asyncio.get_running_loop().call_later(0.6, lambda: asyncio.get_running_loop().run_in_executor(None, server.live))
        await client.open()
        [answer] = await client.generate([question("a")], SamplingParams(16))
        await client.close()
        return answer

    assert asyncio.run(run()).text == "answer to a"


def test_the_model_name(server):
    assert generate(model(server, path="judge"), "a")[0][0].text == "answer to a"
    with pytest.raises(RecipeError, match=r"no model judgee \(it serves: judge\)\. Did you mean judge\?"):
        generate(model(server, path="judgee"), "a")
    generate(model(server, path="gpt-x", dialect="openai"), "a")  # gateways do not list every model they serve
    assert [request.body["model"] for request in server.requests] == ["judge", "gpt-x"]


def test_one_of_several_models_has_to_be_named(server):
    server.others = ["dall-e", "embedder"]
    with pytest.raises(RecipeError, match=r"it serves several models; set model\.path to one of judge, dall-e, embedder"):
        generate(model(server), "a")
    assert generate(model(server, path="judge"), "a")[0][0].text == "answer to a"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:port", "ftp://host", "http://", "http://host:0", "judge"])
def test_invalid_urls_are_rejected(url):
    with pytest.raises(ValidationError, match=r"should look like http://127\.0\.0\.1:8000"):
        model(url)


def test_api_keys_in_arguments_are_rejected():
    with pytest.raises(ValidationError, match="set VLLM_API_KEY in the environment"):
        RewardModel(path="judge", placement="launch", arguments=("--api-key", "sesame"))


def test_a_server_with_an_unknown_context_length(server):
    """If it rejects every prompt, these are failures and not the policy's fault."""
    server.max_model_len = None
    answers, _ = generate(model(server, dialect="openai", path="judge"), "toolong", "toolong too")
    assert [cause(answer) for answer in answers] == ["context"] * 2
    answers, _ = generate(model(server, dialect="openai", path="judge"), "toolong", "short")
    assert [(answer.too_long, answer.refused) for answer in answers] == [(True, True), (False, False)]


def test_replicas_with_different_model_names(server):
    with FaultServer(model="other") as other:
        generate(model(server, other), *"abcd")
        assert {request.body["model"] for request in server.requests} == {"judge"}
        assert {request.body["model"] for request in other.requests} == {"other"}
        with pytest.raises(RecipeError, match="no model judge"):  # a mistake, not a server that may start later
            generate(model(server, other, path="judge"), "a")


def test_urls_with_and_without_a_version():
    for given, root, models in [
        ("http://h:1", "http://h:1/health", "http://h:1/v1/models"),
        ("http://h:1/v1/", "http://h:1/health", "http://h:1/v1/models"),
        ("https://h/judges/v4", "https://h/judges/health", "https://h/judges/v4/models"),
    ]:
        replica = Replica(given)
        assert (str(replica.url("/health")), str(replica.url("/v1/models"))) == (root, models)


def test_keys_come_from_the_environment_and_are_never_shown(monkeypatch):
    with FaultServer(key="velvet-hammer") as server:
        message = r"/v1/models: HTTP 401, 'invalid key \(got \)'\. The server needs a key: set model.credential to the NAME"
        with pytest.raises(RecipeError, match=message):
            generate(model(server), "a")
        with pytest.raises(RecipeError, match="environment variable JUDGE_PASS, which should hold its key, is not set"):
            generate(model(server, credential="JUDGE_PASS"), "a")
        monkeypatch.setenv("JUDGE_PASS", "velvet-hammer")
        assert generate(model(server, credential="JUDGE_PASS"), "a")[0][0].text == "answer to a"
        [answer], _ = generate(model(server, credential="JUDGE_PASS"), "401 a")  # its message repeats the key
        assert answer.failure is not None
        assert "velvet-hammer" not in answer.failure.message
        assert "(got $JUDGE_PASS)" in answer.failure.message


def test_a_text_client_gives_no_scores(server):
    async def run() -> None:
        client = ServerClient(model(server))
        await client.score([conversation("3")])

    with pytest.raises(PlauditError, match="scalar=True"):
        asyncio.run(run())


# Replicas ------------------------------------------------------------------------------------------------------------


def test_the_least_loaded_replica_is_chosen():
    replicas = Replicas(["http://a", "http://b", "http://c"])
    a, b, c = replicas.all
    a.in_flight, b.in_flight, c.in_flight = 2, 1, 3
    assert replicas.choose() is b
    b.in_flight = 5
    assert replicas.choose() is a
    assert replicas.choose(avoid=a) is c


def test_requests_with_one_affinity_stay_on_one_replica_while_it_works():
    replicas = Replicas(["http://a", "http://b"])
    a, b = replicas.all
    assert replicas.choose("x") is a
    a.in_flight = 10
    assert [replicas.choose("x"), replicas.choose("y")] == [a, b]
    assert replicas.choose("x", avoid=a) is b  # a fault moves one call …
    assert replicas.choose("x") is a
    a.failed(gone=True)
    assert replicas.choose("x") is b  # … a dead server moves all of them, for good
    a.answered()
    assert replicas.choose("x") is b


def test_a_failing_replica_is_paused_and_probed_by_one_call(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    replicas = Replicas(["http://a", "http://b"])
    a, b = replicas.all
    b.in_flight = 1
    for _ in range(2):
        a.failed()
    assert replicas.choose() is a  # two faults may be chance
    a.failed()
    assert replicas.choose() is b
    now += 2.1
    assert [replicas.choose(), replicas.choose()] == [a, b]
    a.failed()
    now += 2.1
    assert replicas.choose() is b  # twice as long the second time
    now += 2.0
    assert replicas.choose() is a
    a.answered()
    assert replicas.choose() is a
    for one in (a, b):
        one.failed(gone=True)
    assert replicas.choose() in (a, b)  # none works, but one has to be chosen


def test_a_dead_replica_is_not_used(capsys):
    with FaultServer() as one, FaultServer() as other:
        other.die()
        answers, usage = generate(model(one, other), *map(str, range(100)))
        assert {cause(answer) for answer in answers} == {None}
        assert (len(one.requests), usage.failures) == (100, {})
        assert f"warning: {other.url}/v1/models: nothing listens there" in capsys.readouterr().err


def test_a_replica_that_dies_and_comes_back(monkeypatch):
    monkeypatch.setattr("plaudit.reward_models.replicas.PAUSE_S", 0.05)
    with FaultServer(latency_s=0.005) as one, FaultServer(latency_s=0.005) as other:
        other.dies_after = 20

        async def run() -> tuple[list[Answer], list[Answer], Usage]:
            client = ServerClient(model(one, other), limits=ModelLimits(max_concurrent_calls=16, backoff_s=0.01))
            await client.open()
            before = await client.generate([question(f"a {i}") for i in range(200)], SamplingParams(16))
            other.dies_after = None
            other.live()
            replica = client._connection.replicas.all[1]
            while time.monotonic() <= replica.paused_until:
                await asyncio.sleep(0.01)
            after = await client.generate([question(f"b {i}") for i in range(200)], SamplingParams(16))
            await client.close()
            return before, after, client.usage

        before, after, usage = asyncio.run(run())
        assert {cause(answer) for answer in [*before, *after]} == {None}
        assert usage.retries > 0
        check_counts(usage, 400)
        assert sum(content.startswith("b") for content in other.contents()) > 50


def test_groups_stay_on_one_replica():
    with FaultServer() as one, FaultServer() as other:
        send(model(one, other), [question(f"{i} {k}", affinity=f"g{i}") for i in range(20) for k in range(4)])
        groups = [{content.split()[0] for content in server.contents()} for server in (one, other)]
        assert not groups[0] & groups[1]
        assert len(groups[0] | groups[1]) == 20
        assert min(map(len, groups)) >= 5, "they share the work: the least loaded one gets the next group"


# 2,000 questions, 30 % faults ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_2000_questions_with_30_percent_faults():
    """Three of every ten fail: one permanently, two once or twice."""
    kinds = [kind for kind in CAUSES if kind != "hang"]

    def content(i: int) -> str:
        if i % 10 not in (2, 5, 8):
            return f"good {i}"
        kind = "hang" if i % 100 == 55 else kinds[i // 10 % len(kinds)]
        times = 1 if kind == "hang" else 1 + i // 10 % 2
        return f"{kind} {i}" if i % 10 == 2 else f"{kind}:{times} {i}"

    contents = [content(i) for i in range(2000)]
    assert sum(not one.startswith("good") for one in contents) == 600
    # Two servers count attempts separately, so a fault may take four attempts to pass.
    limits = ModelLimits(max_concurrent_calls=128, backoff_s=0.002, retries=5, attempt_timeout_s=4.0)
    with FaultServer() as one, FaultServer() as other:
        answers, usage = generate(model(one, other), *contents, limits=limits)
        requests = len(one.requests) + len(other.requests)
    for prompt, answer in zip(contents, answers, strict=True):
        kind = prompt.split()[0]
        if kind in CAUSES:
            assert (answer.text, cause(answer)) == (None, CAUSES[kind]), prompt
        else:
            assert (answer.text, answer.failure) == (f"answer to {prompt}", None), prompt
    assert usage.failures == Counter(CAUSES[one.split()[0]] for one in contents if one.split()[0] in CAUSES)
    check_counts(usage, 2000)
    assert requests == usage.calls
    assert usage.new_tokens == 2 * (2000 - 200)


# Limits --------------------------------------------------------------------------------------------------------------


def test_concurrent_calls_are_limited(server):
    server.latency_s = 0.1
    generate(model(server), *map(str, range(12)), limits=ModelLimits(max_concurrent_calls=3))
    assert server.max_in_flight == 3


def test_calls_per_second_are_limited(server):
    began = time.monotonic()
    generate(model(server), *map(str, range(6)), limits=ModelLimits(calls_per_s=50))
    assert all(request.at - began >= 0.02 * i - 1e-3 for i, request in enumerate(server.requests))


def test_waiting_for_the_rate_limit_does_not_count_towards_the_timeout(server):
    answers, _ = generate(model(server), *"abcd", params=SamplingParams(16, timeout_s=2.0), limits=ModelLimits(calls_per_s=1))
    assert [cause(answer) for answer in answers] == [None] * 4


def test_attempts_have_a_timeout_and_are_retried(server):
    limits = ModelLimits(attempt_timeout_s=0.1, retries=1, backoff_s=0.0)
    [answer], usage = generate(model(server), "hang a", limits=limits)
    assert answer.failure is not None
    assert (answer.failure.cause, usage.calls) == ("timeout", 2)
    assert "no answer within 0.1 s" in answer.failure.message


def test_tokens_per_minute_are_limited(monkeypatch):
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(rate_limit.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rate_limit.asyncio, "sleep", sleep)

    async def run() -> list[float]:
        limited, begun = rate_limit.RateLimiter(tokens_per_minute=600), []
        for _ in range(10):
            reserved = await limited.begin(guess=50.0)
            begun.append(now[0])
            limited.release(reserved)
            limited.spend(100)
        await rate_limit.RateLimiter().begin(guess=1e9)  # without a rate there is no wait
        return begun

    # Six calls use up the first minute's tokens; then there are 100 every ten seconds.
    assert asyncio.run(run()) == pytest.approx([0, 0, 0, 0, 0, 0, 10, 20, 30, 40])


def test_calls_in_flight_have_their_tokens_reserved():
    async def run() -> int:
        limited, begun = rate_limit.RateLimiter(tokens_per_minute=600), []

        async def call() -> None:
            await limited.begin(guess=200.0)
            begun.append(1)

        calls = [asyncio.create_task(call()) for _ in range(9)]
        await asyncio.sleep(0.05)
        for one in calls:
            one.cancel()
        return len(begun)

    assert asyncio.run(run()) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": {"path": "m"}, "limits": {"max_concurrent_calls": 3}},
            "limits.max_concurrent_calls belongs to placement: server",
        ),
        ({"model": {"path": "m", "placement": "offload"}, "limits": {"retries": 0}}, "limits.retries belongs to placement: server"),
        ({"model": {"path": "m"}, "limits": {"backoff_s": 2.0}}, "limits.backoff_s belongs to placement: server"),
        ({"model": SERVED, "limits": {"start_timeout_s": 9}}, "limits.start_timeout_s belongs to placement: launch"),
        ({"model": SERVED, "limits": {"max_concurrent_calls": 0}}, "greater than 0"),
        ({"model": {**SERVED, "prompt_price": -1}}, "greater than or equal to 0"),
    ],
)
def test_limits_without_effect_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        ScoreRecipe.model_validate({"rewards": [{"kind": "judge", **settings}]})


def test_rewards_that_share_a_model_must_agree_on_connection_limits():
    def rewards(**limits: Any) -> list[dict[str, Any]]:
        first = {"kind": "judge", "model": SERVED, "limits": {"calls_per_s": 20, "timeout_s": 5}}
        return [first, {"kind": "group_judge", "model": SERVED, "limits": limits}]

    ScoreRecipe.model_validate({"rewards": rewards(calls_per_s=20, timeout_s=9, group_retries=1)})
    with pytest.raises(ValidationError, match=r"judge and group_judge use the same model.*limits.calls_per_s: 20 and null"):
        ScoreRecipe.model_validate({"rewards": rewards()})
    scalar = {"kind": "scalar_model", "model": SERVED}  # a separate connection: it scores, the others generate
    ScoreRecipe.model_validate({"rewards": [*rewards(calls_per_s=20), scalar]})


@pytest.mark.parametrize(
    ("setting", "suggestion"),
    [
        ("limits: {max_concurent_calls: 3}", "rewards.0.limits.max_concurrent_calls"),
        ("limits: {at_once: 3}", "rewards.0.limits.max_concurrent_calls or rewards.0.limits.max_concurrent_groups"),
        ("sampling: {retry: 3}", "rewards.0.limits.unreadable_retries"),
        ("sampling: {timeout_s: 3}", "rewards.0.limits.timeout_s"),
        ("timeout_s: 3", "rewards.0.limits.timeout_s"),
        ("clip: [0, 1]", "rewards.0.bounds"),
    ],
)
def test_an_unknown_setting_of_a_judge_suggests_the_right_one(tmp_path, setting, suggestion):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"rewards: [{{kind: judge, model: {{placement: server, url: 'http://a'}}, {setting}}}]")
    with pytest.raises(RecipeError, match=rf"is not a setting. Did you mean {suggestion}\?"):
        load(recipe)


def test_cost_of_tokens():
    priced = RewardModel(path="m", prompt_price=2.0, answer_price=10.0)
    assert priced.cost(1_000_000, 100_000) == pytest.approx(3.0)
    assert RewardModel(path="m", answer_price=1.0).cost(10**9, 500_000) == pytest.approx(0.5)
    assert RewardModel(path="m").cost(1, 1) is None
