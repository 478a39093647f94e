"""A judge's server that sends too much, or what nobody expects: each answer fails alone, with its cause, in bounded memory."""

import asyncio
import itertools
import json
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq
import pytest

from plaudit.errors import RecipeError
from plaudit.recipe import RewardSettings, ScoreRecipe
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.report.samples import write_samples
from plaudit.reward_models.backend import Answer, GenerationRequest, SamplingParams, Usage
from plaudit.reward_models.server_client import ServerClient
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Score
from support.raw_server import MODELS, RawServer, Reply, chat, response
from support.rewards import group

LIMIT = 2**14
MEMORY = 2**24
"""What reading one answer may take at most, with the buffers of both sides, for the server is in the same process."""
LIMITS = ModelLimits(max_answer_bytes=LIMIT, backoff_s=0.001, retries=1)
HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BLOCK = b"\0" * 2**20


def ask(server: RawServer, limits: ModelLimits = LIMITS) -> tuple[Answer, Usage]:
    async def run() -> tuple[Answer, Usage]:
        client = ServerClient(RewardModel(placement="server", url=(server.url,)), limits)
        try:
            await client.open()
            request = GenerationRequest([{"role": "user", "content": "?"}])
            [answer] = await client.generate([request], SamplingParams(16, timeout_s=60.0))
            return answer, client.usage
        finally:
            await client.close()

    return asyncio.run(run())


def answers(*chunks: Any) -> Reply:
    """A server that lists its model, and answers every call with these bytes."""
    return lambda path, body: None if path == "/v1/models" else itertools.chain.from_iterable(chunks)


def forever(chunk: bytes) -> Iterator[bytes]:
    return itertools.repeat(chunk)


def bomb(encoding: str) -> Iterator[bytes]:
    """Zeros, compressed a thousandfold: 2 MB that become 2 GB."""
    squeeze = zlib.compressobj(9, wbits={"gzip": 31, "deflate": 15, "raw deflate": -15}[encoding])
    # After a full flush the compressor starts anew: each block of zeros becomes the same bytes.
    yield squeeze.compress(BLOCK) + squeeze.flush(zlib.Z_FULL_FLUSH)
    again = squeeze.compress(BLOCK) + squeeze.flush(zlib.Z_FULL_FLUSH)
    yield from itertools.repeat(again, 2**11)


def chunked(data: Iterator[bytes]) -> Iterator[bytes]:
    return (f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in data)


# Size ----------------------------------------------------------------------------------------------------------------


def whole(body: bytes, headers: str = "") -> list[bytes]:
    return [response(body, headers=headers)]


def text_of(size: int) -> bytes:
    """A good answer of that many bytes."""
    empty = len(json.dumps(chat("")))
    return json.dumps(chat("x" * (size - empty))).encode()


def gzipped(data: bytes) -> bytes:
    return zlib.compress(data, wbits=31)


@pytest.mark.parametrize("pack", [lambda data: whole(data), lambda data: whole(gzipped(data), "Content-Encoding: gzip\r\n")])
def test_the_limit_is_exact_and_counts_decompressed_bytes(pack):
    with RawServer(answers(pack(text_of(LIMIT)))) as server:
        answer, _ = ask(server)
    assert answer.failure is None
    with RawServer(answers(pack(text_of(LIMIT + 1)))) as server:
        answer, usage = ask(server)
    assert answer.failure is not None
    assert answer.failure.cause == "too_large"
    assert "limits.max_answer_bytes, 16,384" in answer.failure.message
    assert (usage.calls, usage.retries) == (1, 0)  # it would only be sent again


ENDLESS = {
    "2 GB announced": lambda: ([HEADER + b"Content-Length: 2147483648\r\n\r\n"], forever(BLOCK)),
    "until the connection is closed": lambda: ([HEADER + b"\r\n"], forever(BLOCK)),
    "chunked": lambda: ([HEADER + b"Transfer-Encoding: chunked\r\n\r\n"], chunked(forever(BLOCK))),
    "tiny chunks": lambda: ([HEADER + b"Transfer-Encoding: chunked\r\n\r\n"], forever(b"1\r\n[\r\n" * 10_000)),
    "gzip": lambda: ([HEADER + b"Content-Encoding: gzip\r\n\r\n"], bomb("gzip")),
    "gzip, chunked": lambda: ([HEADER + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"], chunked(bomb("gzip"))),
    "deflate": lambda: ([HEADER + b"Content-Encoding: deflate\r\n\r\n"], bomb("deflate")),
    "raw deflate": lambda: ([HEADER + b"Content-Encoding: deflate\r\n\r\n"], bomb("raw deflate")),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_answer_is_read_up_to_the_limit(name):
    with RawServer(lambda path, body: None if path == "/v1/models" else itertools.chain(*ENDLESS[name]())) as server:
        (answer, usage), peak = traced(lambda: ask(server))
    assert answer.failure is not None
    assert answer.failure.cause == "too_large"
    assert usage.retries == 0
    assert server.sent < 2**26  # what socket buffers take
    assert peak < MEMORY


def traced(work: Any) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip", "deflate"])
def test_compression_that_cannot_be_read_is_garbage(encoding):
    with RawServer(answers(whole(b"\xff" * 100, f"Content-Encoding: {encoding}\r\n"))) as server:
        answer, _ = ask(server)
    assert answer.failure is not None
    assert answer.failure.cause == "garbage"


@pytest.mark.parametrize("status", ["500 Internal Server Error", "400 Bad Request"])
def test_of_an_endless_error_the_beginning_is_quoted(status):
    def endless() -> Iterator[bytes]:
        yield f"HTTP/1.1 {status}\r\n\r\nthe engine broke: ".encode()
        yield from forever(b"badly " * 10_000)

    with RawServer(lambda path, body: None if path == "/v1/models" else endless()) as server:
        answer, _ = ask(server)
    assert answer.failure is not None
    assert answer.failure.cause == ("http" if status.startswith("5") else "rejected")
    assert f"HTTP {status[:3]}, 'the engine broke: badly badly" in answer.failure.message
    assert len(answer.failure.message) < 500
    assert server.sent < 2**26


@pytest.mark.parametrize("header", [b"X-%d: y\r\n" * 100, b"X: " + b"y" * 10_000], ids=["endless headers", "one endless header"])
def test_endless_headers_are_not_http(header):
    with RawServer(answers([HEADER], forever(header))) as server:
        answer, _ = ask(server)
    assert answer.failure is not None
    assert answer.failure.cause == "garbage"
    assert server.sent < 2**26


@pytest.mark.parametrize(
    "data",
    [
        pytest.param([HEADER, b"\r\n{"], id="half a list"),
        pytest.param([response("[" * 5_000)], id="deep JSON"),
        pytest.param([response({"data": [{"id": {}}, 5]})], id="odd entries"),
        pytest.param([response({"data": {"id": "judge"}})], id="no list"),
        pytest.param([response("9" * 5000)], id="a long number"),
    ],
)
def test_an_odd_list_of_models_is_one_line(data):
    with RawServer(lambda path, body: data) as server, pytest.raises(RecipeError, match="/v1/models: not a list of models"):
        ask(server)


def test_an_endless_list_of_models_is_one_line():
    endless = lambda path, body: itertools.chain([HEADER + b"\r\n"], forever(BLOCK))  # noqa: E731
    with (
        RawServer(endless) as server,
        pytest.raises(RecipeError, match=r"/v1/models: the response exceeds limits\.max_answer_bytes"),
    ):
        ask(server)
    assert server.sent < 2**26


# Content -------------------------------------------------------------------------------------------------------------

GOOD = response(chat("<score>8</score>", usage={"prompt_tokens": 3, "completion_tokens": 1}))
ODD_ANSWERS = {
    "deep JSON": response("[" * 50_000),
    "deep objects": response('{"a":' * 50_000),
    "deep usage": response(json.dumps(chat("<score>8</score>"))[:-1] + ', "usage": ' + "[" * 50_000 + "]" * 50_000 + "}"),
    "a long integer": response('{"choices": ' + "9" * 5000 + "}"),
    "NaN": response("NaN"),
    "tokens: NaN": response(chat("<score>8</score>", usage={"prompt_tokens": float("nan")})),
    "tokens: Infinity": response(chat("<score>8</score>", usage={"prompt_tokens": float("inf")})),
    "tokens: 1e999": response(json.dumps(chat("<score>8</score>"))[:-1] + ', "usage": {"prompt_tokens": 1e999}}'),
    "tokens: huge": response(chat("<score>8</score>", usage={"completion_tokens": 10**400})),
    "tokens: negative": response(chat("<score>8</score>", usage={"completion_tokens": -5})),
    "tokens: a string": response(chat("<score>8</score>", usage={"prompt_tokens": "many"})),
    "usage: a string": response(chat("<score>8</score>", usage="none")),
    "text: a number": response({"choices": [{"message": {"content": 8}}]}),
    "text: a list": response({"choices": [{"message": {"content": ["<score>8</score>"]}}]}),
    "choices: a number": response({"choices": 5}),
    "no JSON": response("<score>8</score>"),
    "not UTF-8": response(b'{"choices": "\xff\xfe"}'),
    "empty": response(b""),
}


def score_all(reward: RewardSettings, *texts: str) -> list[Score]:
    with RewardRunner([reward], tolerant=True) as runner:
        [scored] = runner.collect([group(*texts)])
    [scores] = scored.by_reward.values()
    return list(scores)


def reward_on(server: RawServer, **settings: Any) -> RewardSettings:
    limits = {"retries": 0, "backoff_s": 0.0, **settings.pop("limits", {})}
    entry = {
        "model": {"placement": "server", "url": server.url, "path": "judge"},
        "limits": limits,
        "max_failure_rate": 1.0,
        **settings,
    }
    [reward] = ScoreRecipe.model_validate({"rewards": [entry]}).rewards
    return reward


@pytest.mark.parametrize("name", ODD_ANSWERS)
def test_an_odd_answer_fails_its_sample_alone(name):
    def reply(path: str, body: dict[str, Any]) -> list[bytes] | None:
        if path == "/v1/models":
            return None
        return [ODD_ANSWERS[name] if "odd one" in body["messages"][-1]["content"] else GOOD]

    with RawServer(reply) as server:
        judge = reward_on(server, kind="judge", parser="tag", limits={"unreadable_retries": 0})
        good, odd, also_good = score_all(judge, "fine", "odd one", "good")
    assert (good.value, also_good.value) == (8.0, 8.0)
    assert odd.value is None
    assert odd.failure is not None
    assert odd.failure.cause == "garbage"


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e308", "9" * 400, '"0.5"', "true", "null", "[0.5]", "{}"]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:10])
def test_an_odd_score_of_a_scalar_model_fails_its_sample_alone(number):
    def reply(path: str, body: dict[str, Any]) -> list[bytes] | None:
        if path == "/v1/models":
            return None
        value = number if body["messages"][-1]["content"] == "odd one" else "0.5"
        return [response(f'{{"data": [{{"probs": [{value}]}}]}}')]

    with RawServer(reply) as server:
        good, odd, also_good = score_all(reward_on(server, kind="scalar_model"), "fine", "odd one", "good")
    assert (good.value, also_good.value) == (0.5, 0.5)
    assert odd.value is None
    assert odd.failure is not None
    assert odd.failure.cause == "garbage"


JUDGED = ["NaN", "Infinity", "1e999", "1e308", "9" * 400, "[" * 5000, '{"a":' * 5000, '"8/10"', "null"]


@pytest.mark.parametrize("written", JUDGED, ids=lambda text: text[:10])
def test_odd_numbers_written_by_a_judge_are_unreadable(written):
    """Also as votes, whose mean would overflow."""

    def reply(path: str, body: dict[str, Any]) -> list[bytes] | None:
        if path == "/v1/models":
            return None
        number = written if "odd one" in body["messages"][-1]["content"] else "8"
        return [response(chat(f'{{"score": {number}}}'))]

    with RawServer(reply) as server:
        settings = {"kind": "judge", "parser": "json", "votes": 2, "sampling": {"temperature": 1.0}, "lowest": 0, "highest": 1e300}
        judge = reward_on(server, **settings, limits={"unreadable_retries": 0})
        good, odd, also_good = score_all(judge, "fine", "odd one", "good")
    assert (good.value, also_good.value) == (8.0, 8.0)
    assert odd.failure is not None
    assert odd.failure.cause == "unparsable"


def test_an_unpaired_surrogate_does_not_stop_a_run(tmp_path):
    """In the text, and in the name of a part: no file could hold it."""
    said = chat('half \ud800 {"score": 8, "\\ud800": 1}')
    with RawServer(answers([response(said)])) as server, RewardRunner([reward_on(server, kind="judge", parser="json")]) as runner:
        scored = runner.collect([group("fine")])
    [score] = scored[0].scores
    assert (score.value, score.parts["judge/?"]) == (8.0, 1.0)
    write_samples(tmp_path / "samples.parquet", scored)
    assert "half ?" in pq.read_table(tmp_path / "samples.parquet").to_pylist()[0]["trace/judge"]


WAITS = ["inf", "nan", "-5", "1e999", "Mon, 01 Jan 0001 00:00:00 GMT", "Mon, 01 Jan 99999 00:00:00 GMT", "x" * 5000]


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait[:20])
def test_an_odd_retry_after_fails_its_call(wait):
    with RawServer(answers([response("busy", "503 Busy", f"Retry-After: {wait}\r\n")])) as server:
        answer, _ = ask(server)
    assert answer.failure is not None
    assert answer.failure.cause == "http"


def test_a_sound_server_is_read():
    """The other tests fail for the right reason."""
    with RawServer(answers([GOOD])) as server:
        answer, usage = ask(server)
    assert (answer.text, usage.prompt_tokens, usage.new_tokens) == ("<score>8</score>", 3, 1)
    assert MODELS["data"][0]["id"] == "judge"
