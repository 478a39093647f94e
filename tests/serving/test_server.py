"""`plaudit serve`: a real server in a separate process, tested over HTTP."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest
import yaml

from plaudit.data.conversations import ROLES
from support.paths import REPOSITORY
from support.rows import write_jsonl
from support.serving import HttpResponse, ServerProcess, run_server

FUNCTION = """
import pathlib, time

def compute_score(solution_str, extra_info=None):
    word, _, rest = solution_str.partition(" ")
    if word == "raise":
        raise ValueError("no such thing")
    if word == "nan":
        return float("nan")
    if word == "sleep":
        time.sleep(float(rest))
    if word == "wait":
        while not pathlib.Path(rest).exists():
            time.sleep(0.01)
    if word == "touch":
        time.sleep(0.05)
        pathlib.Path(rest).touch()
    return {"score": float(len(solution_str)), "words": len(solution_str.split())}
"""
TOKEN = "correct-horse-7"
SCORED = {"prompt": "2 + 2 =", "responses": ["4", "5"], "ground_truth": "4"}


def function(folder: Path, **settings: Any) -> dict:
    (folder / "function.py").write_text(FUNCTION)
    return {
        "kind": "function",
        "name": "mine",
        "path": str(folder / "function.py"),
        "workers": 2,
        "limits": {"timeout_s": 30},
        **settings,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def rewards(folder) -> list[dict]:
    return [
        {"kind": "exact", "view": {"extract": "line"}, "when": {"data_source": ["", "sums"]}},
        function(folder, weight=0.5, when={"data_source": "mine*"}, limits={"timeout_s": 30, "give_up_after": None}),
        {"kind": "length", "unit": "words", "at_most": 3, "weight": 0.0},
        {"kind": "overlong", "max_tokens": 10, "buffer_tokens": 10, "when": {"data_source": "sums"}},
    ]


@pytest.fixture(scope="module")
def served(folder, rewards) -> Iterator[ServerProcess]:
    limits = ("--max-items", 300, "--max-body-bytes", 200_000, "--max-in-flight", 40, "--timeout-s", 6)
    with run_server(folder, rewards, *limits) as running:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()


# Scores --------------------------------------------------------------------------------------------------------------


def test_item_has_a_score_for_each_response(served):
    [item] = served.score({**SCORED, "id": "mine"})
    assert (item["index"], item["id"]) == (0, "mine")
    first, second = item["responses"]
    parts = {"exact": 1.0, "length": 1.0, "length/length": 1.0}
    assert first == {"reward": 1.0, "parts": parts, "malformed": False, "failure": None, "by_reward": None}
    assert (second["reward"], second["parts"]["exact"]) == (0.0, 0.0)


def test_scores_match_plaudit_score(served, folder, rewards, plaudit):
    rows = [
        {"prompt": f"{i} + 1 =", "responses": [f"so\n{i + 1}", f"{i}", ""], "ground_truth": str(i + 1)} | extra
        for i in range(20)
        for extra in ({}, {"data_source": "sums", "tokens": [5, 12, None]}, {"data_source": "mine"}, {"data_source": "nobody's"})
    ]
    rows += [{"prompt": "p", "responses": ["raise", "nan", "some words"], "data_source": "mine"}]
    rows += [{"prompt": [{"role": "user", "content": "no truth"}], "responses": ["4"]}]
    write_jsonl(folder / "rows.jsonl", rows)
    (folder / "r.yaml").write_text(yaml.safe_dump({"rewards": rewards}))
    out = folder / "out.jsonl"
    assert plaudit("score", folder / "r.yaml", folder / "rows.jsonl", "--out", out, "--allow-failures")[0] == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    items = []
    for row in written:
        tokens = row.get("tokens") or [None] * len(row["responses"])
        responses = [{"text": text, "tokens": count} for text, count in zip(row["responses"], tokens, strict=True)]
        fields = {name: row[name] for name in ("id", "prompt", "ground_truth", "data_source") if name in row}
        items.append({**fields, "responses": responses})
    for row, item in zip(written, served.score(*items), strict=True):
        assert item["id"] == row["id"]
        for name in ("reward", "parts", "malformed", "failure"):
            assert [response[name] for response in item["responses"]] == row[name], row
    assert any(None in row["reward"] for row in written)


def test_failed_reward_is_reported_with_its_cause(served):
    raised, nan, fine = served.score({"responses": ["raise", "nan", "fine"], "data_source": "mine"})[0]["responses"]
    assert (raised["reward"], raised["failure"]["reward"], raised["failure"]["cause"]) == (None, "mine", "exception")
    assert "no such thing" in raised["failure"]["message"]
    assert (nan["reward"], nan["failure"]["cause"]) == (None, "not_a_number")
    assert (fine["reward"], fine["failure"]) == (2.0, None)
    assert served.metric('plaudit_reward_failures_total{reward="mine",cause="exception"}') >= 1


def test_details_include_each_rewards_score(served):
    [item] = served.score({"responses": ["so\n4"], "ground_truth": "4"}, details=True)
    by_reward = item["responses"][0]["by_reward"]
    assert (by_reward["exact"]["value"], by_reward["exact"]["view"]) == (1.0, "4")
    assert by_reward["mine"] == {"value": None, "parts": {}, "malformed": False, "failure": None, "view": None, "trace": {}}
    assert by_reward["length"]["parts"] == {"length": 2.0}


def test_stream_sends_each_item_as_soon_as_it_is_scored(served, tmp_path):
    gate = tmp_path / "gate"
    items = [
        {"responses": [f"wait {gate}"], "data_source": "mine", "id": "slow"},
        SCORED,
        {"responses": ["raise"], "data_source": "mine"},
    ]
    request = urllib.request.Request(
        served.url + "/score/stream", json.dumps({"items": items}).encode(), {"Content-Type": "application/json"}
    )
    lines = []
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        for line in answer:
            lines.append(json.loads(line))
            if len(lines) == 2:
                gate.touch()  # the slow item is blocked until the others have arrived
    assert sorted(line["index"] for line in lines) == [0, 1, 2]
    assert (lines[-1]["index"], lines[-1]["id"]) == (0, "slow")
    assert lines[-1]["responses"][0]["failure"] is None


def test_timeout_fails_slow_items_only(served):
    slow, quick = served.score({"responses": ["sleep 7", "sleep 7"], "data_source": "mine"}, SCORED)
    assert [response["failure"]["cause"] for response in slow["responses"]] == ["timeout", "timeout"]
    assert [response["reward"] for response in quick["responses"]] == [1.0, 0.0]
    assert served.metric('plaudit_samples_without_value_total{cause="timeout"}') == 2


def test_concurrent_requests_get_their_own_scores(served):
    async def request_all() -> list[tuple[int, float | None]]:
        connector = aiohttp.TCPConnector(limit=32)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def request(i: int) -> tuple[int, float | None]:
                item = {"responses": ["x" * (i % 50)], "data_source": "mine"} if i % 2 else {**SCORED, "ground_truth": "5"}
                async with session.post(f"{served.url}/score", json={"items": [item]}) as answer:
                    assert answer.status == 200, await answer.text()
                    return i, (await answer.json())["items"][0]["responses"][0]["reward"]

            return await asyncio.gather(*map(request, range(600)))

    for i, reward in asyncio.run(request_all()):
        assert reward == (0.5 * (i % 50) if i % 2 else 0.0)
    assert served.metric("plaudit_in_flight") == 0


@pytest.mark.parametrize(("path", "status"), [("/score", 499), ("/score/stream", 200)])
def test_work_is_cancelled_when_the_client_disconnects(served, tmp_path, path, status):
    items = [{"responses": [f"touch {tmp_path / str(i)}"], "data_source": "mine"} for i in range(290)]
    body = json.dumps({"items": items}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    finished = f'plaudit_requests_total{{path="{path}",status="{status}"}}'
    before = served.metric(finished)
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        served.wait_until(lambda: any(tmp_path.iterdir()))
    served.wait_until(lambda: served.metric("plaudit_in_flight") == 0)
    assert served.metric(finished) == before + 1
    # The workers still finish the calls already sent to them, 16 each; a call to both of them queues behind these.
    served.wait_until(lambda: served.score({"responses": ["x"] * 40, "data_source": "mine"})[0]["responses"][-1]["reward"] == 0.5)
    assert len(list(tmp_path.iterdir())) < 200


# Rejected requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "where", "message"),
    [
        (b"", "body", "is missing"),
        (b"{", "body", "is not valid JSON"),
        (b"\xff\xfe{}", "body", "is not valid JSON"),
        (b"[]", "body", "should be"),
        (b'{"items": [{"responses": ["a"], "ground_truth": NaN}]}', "body", "NaN is not a number"),
        (b'{"items": [{"responses": ["a"], "ground_truth": -Infinity}]}', "body", "-Infinity is not a number"),
        (b'{"items": [{"responses": ["a"], "ground_truth": 1e999}]}', "body", "1e999 is too large"),
        (b'{"items": [{"responses": ["a"], "ground_truth": ' + b"9" * 5000 + b"}]}", "body", "is not valid JSON"),
        (b'{"items": [{"responses": ["a"], "ground_truth": ' + b"[" * 90 + b"]" * 90 + b"}]}", "body", "deeper than 64"),
        (b'{"items": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "body", "deeper than 64"),
        (b'{"items": [{"responses": ["a\\ud800"]}]}', "items.0.responses.0", "unpaired surrogate"),
        (b'{"items": [{"responses": ["a"]}, {"responses": ["a"], "ground_truth": "\\ud800"}]}', "items.1", "unpaired surrogate"),
        (b'{"items": [{"responses": ["a"], "extra_info": {"\\udfff": 1}}]}', "items.0", "unpaired surrogate"),
        (b'{"items": [{"responses": []}]}', "items.0.responses", "at least 1 item"),
        (b'{"items": [{"responses": ["a"]}, {"response": "a"}]}', "items.1.responses", "is missing"),
        (b'{"items": [{"responses": ["a"], "respones": "a"}]}', "items.0.respones", "Did you mean responses?"),
        (b'{"items": [{"responses": [3]}]}', "items.0.responses.0", "should be text, or an object with `text`"),
        (b'{"items": [{"responses": [{"text": "a", "tokens": -1}]}]}', "items.0.responses.0.tokens", "greater than or equal to 0"),
        (b'{"items": [{"responses": [{"text": "a", "tokens": "3"}]}]}', "items.0.responses.0.tokens", "integer"),
        (b'{"items": [{"responses": ["a"], "prompt": []}]}', "items.0.prompt", "at least 1 item"),
        (b'{"items": [{"responses": ["a"], "prompt": [{"role": "usr", "content": ""}]}]}', "items.0.prompt.0.role", "'user'"),
        (b'{"items": [{"responses": ["a"], "extra_info": 3}]}', "items.0.extra_info", "dictionary"),
    ],
    ids=lambda value: value[:40].decode(errors="replace") if isinstance(value, bytes) else None,
)
@pytest.mark.parametrize("path", ["/score", "/score/stream"])
def test_invalid_input_is_located(served, path, body, where, message):
    answer = served.request(path, body)
    assert (answer.status, answer.json["cause"]) == (422, "unreadable"), answer.body
    assert where in [problem["where"] for problem in answer.json["problems"]]
    assert message in str(answer.json["problems"])


def test_unusual_numbers_and_texts_are_accepted(served):
    truths = [10**4000, 1e308, -0.0, True, None, {"a": [1, {"b": None}]}, "\x00", "𝄞", [], "9" * 5000]
    items = [{"responses": ["\x00 𝄞 \u202e", "", "nan", "1e999"], "ground_truth": truth, "prompt": "[{"} for truth in truths]
    assert len(served.score(*items, details=True)) == len(truths)


def test_requests_over_the_limits_are_rejected(served):
    many = served.request("/score", {"items": [{"responses": ["a"]}] * 301})
    assert (many.status, many.json["problems"][0]["where"]) == (422, "items")
    assert "301 items exceed the limit of 300" in many.json["message"]
    large = served.request("/score", {"items": [{"responses": ["a" * 300_000]}]})
    assert (large.status, large.json["cause"]) == (413, "too_large")
    assert "200,000 bytes" in large.json["message"]
    assert served.request("/score", {"items": []}).json == {"items": []}


def test_chunked_body_is_limited_too(served):
    async def send() -> int:
        async def chunks():
            for _ in range(100):
                yield b" " * 10_000

        async with aiohttp.ClientSession() as session, session.post(f"{served.url}/score", data=chunks()) as answer:
            return answer.status

    assert asyncio.run(send()) == 413


def test_requests_beyond_max_in_flight_get_429(served):
    async def request_all() -> list[int]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def request(_: int) -> int:
                body = {"items": [{"responses": ["sleep 0.25"], "data_source": "mine"}]}
                async with session.post(f"{served.url}/score", json=body) as answer:
                    if answer.status == 429:
                        assert answer.headers["Retry-After"]
                        assert (await answer.json())["cause"] == "busy"
                    return answer.status

            return await asyncio.gather(*map(request, range(60)))

    statuses = asyncio.run(request_all())
    assert 0 < statuses.count(429) <= 20  # fewer than 20 if some finish before the last ones arrive
    assert statuses.count(200) == 60 - statuses.count(429)


def test_unknown_paths_methods_and_content_types_are_rejected(served):
    assert served.request("/nothing").status == 404
    wrong = served.request("/score", method="GET")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    text = served.request("/score", b"{}", **{"Content-Type": "text/plain"})
    assert (text.status, text.json["message"]) == (422, "body: should be sent as Content-Type: application/json")


# Other paths ---------------------------------------------------------------------------------------------------------


def test_rewards_are_listed_with_their_settings(served):
    rewards = {reward["name"]: reward for reward in served.request("/rewards").json["rewards"]}
    assert list(rewards) == ["exact", "mine", "length", "overlong"]
    assert (rewards["mine"]["kind"], rewards["mine"]["weight"]) == ("function", 0.5)
    assert rewards["length"]["settings"] == {"unit": "words", "at_most": 3, "weight": 0.0}


def test_metrics_follow_prometheus_format_and_count(served):
    before = served.metric("plaudit_samples_total"), served.metric('plaudit_requests_total{path="/score",status="200"}')
    served.score(SCORED)
    assert served.metric("plaudit_samples_total") == before[0] + 2
    assert served.metric('plaudit_requests_total{path="/score",status="200"}') == before[1] + 1
    answer = served.request("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    declared = set()
    for line in answer.body.decode().splitlines():
        if line.startswith("# TYPE"):
            declared.add(line.split()[2])
        elif not line.startswith("#"):
            sample = re.fullmatch(r'(\w+)(\{\w+="[^"]*"(,\w+="[^"]*")*\})? (\S+)', line)
            assert sample, line
            float(sample[4])
            assert sample[1] in declared or re.sub("_(bucket|sum|count)$", "", sample[1]) in declared
    buckets = [served.metric(f'plaudit_request_seconds_bucket{{path="/score",le="{le}"}}') for le in ("0.001", "1.0", "+Inf")]
    assert buckets == sorted(buckets)
    assert 0.0 < served.metric('plaudit_reward_mean{reward="exact"}') < 1.0


def test_openapi_lists_all_paths_and_errors(served):
    assert served.request("/health").json["state"] == "ready"
    assert b"swagger" in served.request("/docs").body
    described = served.request("/openapi.json").json
    assert set(described["paths"]) == {"/health", "/rewards", "/metrics", "/score", "/score/stream"}
    assert described["components"]["schemas"]["ScoreRequest"]["properties"]["items"]["maxItems"] == 300
    for path in ("/score", "/score/stream"):
        assert {"200", "408", "413", "422", "429", "500", "503"} == set(described["paths"][path]["post"]["responses"])


def test_roles_match_those_of_conversations():
    from plaudit.serving.schemas import Message

    assert get_args(Message.model_fields["role"].annotation) == ROLES


# Tokens, starting and stopping ---------------------------------------------------------------------------------------


def test_token_is_required_except_for_public_paths(tmp_path):
    with run_server(tmp_path, [{"kind": "exact"}], "--token-env", "SCORES", SCORES=TOKEN) as served:
        for path, body in (("/score", {"items": []}), ("/score/stream", {"items": []}), ("/rewards", None), ("/metrics", None)):
            for wrong in (None, TOKEN[:-1], TOKEN + "x"):
                answer = served.request(path, body, token=wrong)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert served.request(path, body, Authorization=f"Basic {TOKEN}").status == 401
            assert served.request(path, body, token=TOKEN).status == 200
        assert served.request("/health").status == 200
        described = served.request("/openapi.json").json
        assert described["paths"]["/score"]["post"]["security"] == [{"token": []}]
        assert "security" not in described["paths"]["/health"]["get"]
        assert TOKEN not in served.log.read_text()


def test_signal_finishes_requests_in_flight(tmp_path):
    with run_server(tmp_path, [function(tmp_path)]) as served:
        answers: list[HttpResponse] = []
        gate = tmp_path / "gate"
        body = {"items": [{"responses": [f"wait {gate}"]}, {"responses": ["four"]}]}
        requests = [
            threading.Thread(target=lambda path=path: answers.append(served.request(path, body)))
            for path in ("/score", "/score/stream")
        ]
        for thread in requests:
            thread.start()
        served.wait_until(lambda: served.metric("plaudit_in_flight") == 2)
        served.process.send_signal(signal.SIGTERM)
        served.wait_until(lambda: "finishing 2 requests" in served.log.read_text())
        gate.touch()
        assert served.process.wait(100) == 0
        for thread in requests:
            thread.join()
        assert [answer.status for answer in answers] == [200, 200]
        rewards = [f'"reward":{float(len(text))}'.encode() for text in (f"wait {gate}", "four")]
        assert all(reward in answer.body for answer in answers for reward in rewards)
        with pytest.raises(urllib.error.URLError):
            served.request("/health")


@pytest.mark.slow
def test_requests_beyond_the_grace_period_fail(tmp_path):
    with run_server(tmp_path, [function(tmp_path)], "--grace-s", 0.5) as served:
        answers: list[HttpResponse] = []
        requests = threading.Thread(
            target=lambda: answers.append(served.request("/score", {"items": [{"responses": ["sleep 25"]}]}))
        )
        requests.start()
        served.wait_until(lambda: served.metric("plaudit_in_flight") == 1)
        assert served.stop(signal.SIGINT) == 0
        requests.join()
        assert answers[0].json["items"][0]["responses"][0]["failure"]["cause"] == "stopping"


@pytest.mark.slow
def test_second_signal_stops_at_once(tmp_path):
    with run_server(tmp_path, [function(tmp_path)]) as served:

        def request() -> None:
            with pytest.raises((ConnectionError, urllib.error.URLError)):
                served.request("/score", {"items": [{"responses": ["sleep 25"]}]})

        requests = threading.Thread(target=request)
        requests.start()
        served.wait_until(lambda: served.metric("plaudit_in_flight") == 1)
        served.process.send_signal(signal.SIGTERM)
        served.wait_until(lambda: "stopping" in served.log.read_text())
        assert served.stop() == 128 + signal.SIGTERM
        requests.join()


@pytest.mark.slow
def test_health_responds_while_rewards_open(tmp_path):
    reward = function(tmp_path)
    (tmp_path / "function.py").write_text("import time\ntime.sleep(1000)\n" + FUNCTION)
    with run_server(tmp_path, [reward], ready=False) as served:
        answer = served.request("/health")
        assert (answer.status, answer.json["state"]) == (503, "starting")
        refused = served.request("/score", {"items": []})
        assert (refused.status, refused.json["cause"]) == (503, "starting")
        assert served.stop() == 0  # stops before it is ready


def test_reward_that_cannot_open_is_reported(tmp_path):
    reward = function(tmp_path)
    (tmp_path / "function.py").write_text("import nothing_of_the_sort")
    with run_server(tmp_path, [reward]) as served:
        assert served.process.wait(200) == 2
        assert "nothing_of_the_sort" in served.log.read_text().splitlines()[-1]
        assert "Traceback" not in served.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: anyone who can reach this machine could use the rewards"),
        (["--token-env", "NOT_THERE"], "--token-env NOT_THERE: this environment variable is unset or empty"),
        (["--host", "256.0.0.1", "--insecure"], "--host 256.0.0.1: "),
        (["rewards.0.wieght=2"], "is not a setting. Did you mean rewards.0.weight?"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(tmp_path, plaudit, arguments, message):
    (tmp_path / "r.yaml").write_text("rewards: [{kind: exact}]")
    code, out, err = plaudit("serve", tmp_path / "r.yaml", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_port_in_use_is_reported(tmp_path, plaudit):
    (tmp_path / "r.yaml").write_text("rewards: [{kind: exact}]")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = plaudit("serve", tmp_path / "r.yaml", "--port", taken.getsockname()[1])
    assert code == 2
    assert "cannot listen on 127.0.0.1:" in err
    assert "Choose another --port" in err


def test_missing_extra_is_named(tmp_path, plaudit, monkeypatch):
    (tmp_path / "r.yaml").write_text("rewards: [{kind: exact}]")
    for name in [name for name in sys.modules if name.startswith(("plaudit.serving.", "uvicorn"))]:
        if name != "plaudit.serving.cli":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = plaudit("serve", tmp_path / "r.yaml")
    assert code == 2
    assert "pip install 'fastapi>=" in err


# Rewards with models -------------------------------------------------------------------------------------------------


class Judge(BaseHTTPRequestHandler):
    """Scores each candidate, which is a number, with its own value."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({"data": [{"id": "judge"}]})

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        scores = dict(re.findall(r"^\[([A-Z])\]\n(\d+)$", prompt, re.MULTILINE))
        text = "Scores:\n" + ", ".join(f"{letter}: {score}" for letter, score in scores.items())
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        self._send({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 7}})

    def _send(self, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.slow
def test_group_judge_sees_the_responses_of_an_item_together(tmp_path):
    judge = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=judge.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{judge.server_port}"
    reward = {"kind": "group_judge", "answer": "score", "model": {"placement": "server", "url": url, "path": "judge"}}
    with run_server(tmp_path, [reward], "--cache", tmp_path / "scores.sqlite") as served:
        for repeat in (0, 1):
            first, second = served.score({"responses": ["3", "8"]}, {"responses": ["1", "2", "5"]}, details=True)
            assert [response["reward"] for response in first["responses"]] == [3.0, 8.0]
            assert [response["reward"] for response in second["responses"]] == [1.0, 2.0, 5.0]
            assert "[A]" in first["responses"][0]["by_reward"]["group_judge"]["trace"]["prompt"]
            assert served.metric('plaudit_reward_cached_total{reward="group_judge"}') == 5 * repeat
        assert served.metric('plaudit_model_calls_total{model="judge"}') == 2
        assert served.metric('plaudit_model_prompt_tokens_total{model="judge"}') == 200
        assert served.metric('plaudit_model_new_tokens_total{model="judge"}') == 14
        [description] = served.request("/rewards").json["rewards"]
        assert description["compares_responses"] is True
        assert url not in json.dumps(description)
        assert served.stop() == 0
    judge.shutdown()


# The documentation ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_documentation_examples_run_as_shown(tmp_path):
    text = (REPOSITORY / "docs/serve.md").read_text(encoding="utf-8")
    rewards = yaml.safe_load(re.findall(r"^rewards: (\[.*\])$", text, re.MULTILINE)[0])
    request = json.loads(re.findall(r"curl -s localhost:8321/score .* -d '(.*?)'\n```", text, re.DOTALL)[0])
    answer = json.loads(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    client, stream = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    with run_server(tmp_path, rewards) as served:
        assert served.request("/score", request).json == answer
        code = f"import json\n{client}\n{stream}".replace("http://127.0.0.1:8321", served.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
        assert done.stdout.splitlines() == ["[1.1, 0.1]", "0 [1.1, 0.1]"], done.stderr
    assert "    [1.1, 0.1]\n" in text


@pytest.mark.slow
def test_a_server_of_rules_starts_without_torch():
    """Importing it takes longer than all else."""
    code = "import sys, plaudit.serving.server; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Fuzzing -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("token", [None, TOKEN])
def test_api_conforms_to_its_openapi_description(tmp_path, token):
    """Valid and invalid requests generated from the description: no 5xx, nothing undocumented, no valid request rejected."""
    rewards = [{"kind": "exact"}, {"kind": "math", "name": "maths"}, function(tmp_path), {"kind": "repetition", "weight": 0.1}]
    secured = ("--token-env", "SCORES") if token else ()
    with run_server(tmp_path, rewards, *secured, "--timeout-s", 10, SCORES=TOKEN) as served:
        command = [
            str(Path(sys.executable).with_name("schemathesis")), "run", f"{served.url}/openapi.json", "--checks", "all",
            "--seed", "7", "--max-examples", "5" if token else "15", "--request-timeout", "20", "--no-color",
        ]  # fmt: skip
        if token:
            command += ["--header", f"Authorization: Bearer {token}"]
            served.token = token
        done = subprocess.run(command, capture_output=True, text=True, timeout=1000, cwd=tmp_path)
        assert done.returncode == 0, re.sub(r"\n +curl .*", "", done.stdout)[-6000:]
        assert "No issues found" in done.stdout
        assert served.request("/health").json["state"] == "ready"
        assert served.metric('plaudit_requests_total{path="/score",status="200"}') > 10
        assert served.stop() == 0
        assert "Traceback" not in served.log.read_text()
