"""`plaudit serve` under attack: slow patterns, huge requests, and connections that never send or read what they should.

Nothing here is timed. That the server is not blocked shows in the order of things: it answers during the attack.
"""

import json
import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from plaudit.host import raise_open_file_limit
from support.serving import ServerProcess, run_server

SLOW = "a" * 500 + "b"
"""`(a|aa)+$` would search it for ever."""
ANSWER = {"prompt": "2 + 2 =", "responses": ["4", "5"], "ground_truth": "4"}
HEADER = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
RULES = [{"kind": "exact"}, {"kind": "repetition", "weight": 0.1}]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[ServerProcess]:
    with run_server(tmp_path_factory.mktemp("attacked"), RULES) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def scores(server: ServerProcess) -> list[float]:
    return [response["reward"] for response in server.score(ANSWER)[0]["responses"]]


def wait_for_end(connection: socket.socket) -> bytes:
    """What the server still sends before it closes the connection."""
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return received


# Requests that take long ---------------------------------------------------------------------------------------------


def test_requests_are_answered_while_a_large_one_is_scored(served):
    items, before = [{"responses": ["a"] * 64, "ground_truth": "a"}] * 128, served.metric("plaudit_samples_total")
    seen_in_between = threading.Event()

    def request() -> None:
        while not seen_in_between.is_set():
            served.score(*items)

    large = threading.Thread(target=request)
    large.start()
    try:  # the metrics are answered when a part of a request's responses is scored
        served.wait_until(lambda: (served.metric("plaudit_samples_total") - before) % (64 * len(items)) != 0, 200)
    finally:
        seen_in_between.set()
        large.join()


def test_requests_are_answered_while_a_large_one_is_parsed(served):
    fields = {str(i): i for i in range(60_000)}
    items, before = [{"responses": ["a"], "extra_info": fields}] * 8, served.metric("plaudit_samples_total")
    seen_meanwhile, others = threading.Event(), 0

    def request() -> None:
        while not seen_meanwhile.is_set():
            assert served.request("/score", {"items": items}).status == 200

    def answered_meanwhile() -> bool:
        """Whether a small request was scored while none of the large one's items were."""
        nonlocal others
        begun, parsed = served.metric("plaudit_in_flight") == 1, served.metric("plaudit_samples_total")
        assert scores(served) == [1.0, 0.0]
        others += 2
        return begun and served.metric("plaudit_in_flight") == 1 and served.metric("plaudit_samples_total") == parsed + 2

    large = threading.Thread(target=request)
    large.start()
    try:
        served.wait_until(answered_meanwhile, 200)
    finally:
        seen_meanwhile.set()
        large.join()
    assert (served.metric("plaudit_samples_total") - before - others) % len(items) == 0


def test_long_answer_arrives_complete(served):
    texts = [letter * 300_000 for letter in "abc"]
    request = {"items": [{"responses": texts, "ground_truth": texts[1]}], "details": True}
    [item] = served.request("/score", request).json["items"]
    assert [response["by_reward"]["exact"]["view"] for response in item["responses"]] == texts
    assert [response["by_reward"]["exact"]["value"] for response in item["responses"]] == [0.0, 1.0, 0.0]
    assert json.loads(served.request("/score/stream", request).body) == item


def test_large_item_is_scored_like_small_ones(served):
    texts = [str(i % 7) for i in range(1000)]
    [large] = served.score({"responses": texts, "ground_truth": "4"}, details=True)
    small = served.score(*({"responses": texts[i : i + 5], "ground_truth": "4"} for i in range(0, 1000, 5)), details=True)
    assert large["responses"] == [response for item in small for response in item["responses"]]
    assert sum(response["reward"] for response in large["responses"]) == 143.0


@pytest.mark.parametrize(
    ("items", "status", "message"),
    [
        ([{"responses": ["a"] * 1024}] * 1024, 413, "524,288 commas and brackets"),
        ([{"responses": ["a"] * 1024}] * 17, 422, "17,408 responses exceed the limit of 16,384"),
        ([{"responses": ["a"], "extra_info": {"lists": [[]] * 300_000}}], 413, "524,288 commas and brackets"),
        ([{"responses": ["a" * (2**20 + 1)]}], 422, "at most 1048576 characters"),
        ([{"responses": ["a"], "extra_info": {"text": '"' * 2_500_000}}], 413, "a text in the body exceeds 4,194,304 bytes"),
        ([{"responses": ["a"], "extra_info": {"lists": [[]] * 70_000}}], 422, "at most 65536 values"),
    ],
)
def test_requests_with_too_many_values_are_rejected(served, items, status, message):
    answer = served.request("/score", {"items": items})
    assert answer.status == status, answer.body[:500]
    assert message in answer.json["message"]
    assert scores(served) == [1.0, 0.0]


# Connections ---------------------------------------------------------------------------------------------------------


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


@pytest.fixture(scope="module")
def with_few_files(tmp_path_factory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("few_files")
    with run_server(folder, RULES, "--token-env", "SCORES", before_start=few_files, SCORES="secret") as running:
        running.token = "secret"
        yield running
        assert "Traceback" not in running.log.read_text()


@pytest.mark.parametrize("sent", [b"", b"POST /sco", HEADER[:-2], HEADER + b"{"], ids=["nothing", "line", "header", "body"])
def test_connections_that_send_no_complete_request_lock_nobody_out(with_few_files, sent):
    server = with_few_files
    raise_open_file_limit()
    assert "at most 128 connections" in server.log.read_text()
    dropped = server.metric('plaudit_connections_closed_total{cause="limit"}')
    with ExitStack() as stack:
        for _ in range(1100):
            connection = stack.enter_context(server.connect())
            with suppress(OSError):  # closed already, in favour of the next ones
                connection.sendall(sent)
        assert server.request("/health").status == 200
        assert scores(server) == [1.0, 0.0]
        assert server.metric("plaudit_connections") <= 128
        assert server.metric('plaudit_connections_closed_total{cause="limit"}') > dropped
    server.wait_until(lambda: server.metric("plaudit_connections") == 1)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory) -> Iterator[ServerProcess]:
    limits = ("--header-timeout-s", 0.5, "--body-timeout-s", 0.5, "--keep-alive-s", 0.5, "--send-timeout-s", 0.5)
    with run_server(tmp_path_factory.mktemp("impatient"), RULES, *limits, "--max-in-flight", 1) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def test_silent_connection_is_closed(impatient):
    with impatient.connect() as connection:
        assert wait_for_end(connection) == b""


def test_header_must_arrive_in_time(impatient):
    with impatient.connect() as connection:
        connection.sendall(HEADER[:20])
        assert wait_for_end(connection).startswith(b"HTTP/1.1 408 ")


def test_header_that_arrives_byte_by_byte_is_given_up(impatient):
    with impatient.connect() as connection:
        connection.settimeout(0.05)
        received = None
        while received is None:
            connection.sendall(b"X")
            with suppress(TimeoutError):
                received = connection.recv(100)
    assert received.startswith(b"HTTP/1.1 408 ")


def test_second_header_must_arrive_in_time_too(impatient):
    with impatient.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea")
        answer = wait_for_end(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer


def test_idle_connection_is_closed(impatient):
    with impatient.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = wait_for_end(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"408" not in answer


def test_slow_bodies_end_in_408_and_take_no_place_in_flight(impatient):
    with impatient.connect() as first, impatient.connect() as second:
        for connection in (first, second):
            connection.sendall(HEADER + b'{"items": [')
        assert scores(impatient) == [1.0, 0.0]  # --max-in-flight is 1
        for connection in (first, second):
            answer = wait_for_end(connection)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"cause":"slow"' in answer


def test_client_that_does_not_read_is_disconnected(tmp_path: Path):
    body = json.dumps({"items": [{"responses": ["word " * 100_000] * 16}], "details": True}).encode()
    # Its own server: 8 MB may take longer to arrive than `impatient` waits.
    with run_server(tmp_path, RULES, "--send-timeout-s", 0.5, "--max-in-flight", 1) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.sendall(HEADER.replace(b"1000", str(len(body)).encode()) + body)
        server.wait_until(lambda: server.metric('plaudit_connections_closed_total{cause="send_timeout"}') == 1, 60)
        server.wait_until(lambda: server.metric("plaudit_in_flight") == 0)
        assert scores(server) == [1.0, 0.0]
        assert "Traceback" not in server.log.read_text()


def test_unfinished_bodies_share_limited_memory(tmp_path: Path):
    with run_server(tmp_path, RULES, "--max-body-bytes", 10_000) as server, ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(20)]
        for connection in connections:
            connection.sendall(HEADER.replace(b"1000", b"10000") + b" " * 9_000)
        # 20 · 9,000 bytes exceed 16 · 10,000 by more than two bodies.
        server.wait_until(lambda: len(select.select(connections, [], [], 0)[0]) >= 3)
        ended = select.select(connections, [], [], 0)[0]
        assert {wait_for_end(connection)[:13] for connection in ended} == {b"HTTP/1.1 408 "}
        assert scores(server) == [1.0, 0.0]


# Patterns that search for ever (last, since their server searches until it is stopped) ---------------------------------


@pytest.fixture(scope="module")
def searching(tmp_path_factory) -> Iterator[ServerProcess]:
    slow_pattern = {"kind": "regex", "pattern": "(a|aa)+$", "when": {"data_source": "regex"}, "limits": {"timeout_s": 250}}
    with run_server(tmp_path_factory.mktemp("searching"), [*RULES, slow_pattern], "--max-responses", 10) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def test_requests_are_answered_while_a_pattern_is_searched(searching):
    body = json.dumps({"items": [{"responses": [SLOW], "data_source": "regex"}]}).encode()
    with searching.connect() as slow:
        slow.sendall(HEADER.replace(b"1000", str(len(body)).encode()) + body)
        searching.wait_until(lambda: searching.metric("plaudit_in_flight") == 1)
        assert searching.request("/health").status == 200
        assert scores(searching) == [1.0, 0.0]
        assert searching.metric("plaudit_in_flight") == 1  # still
    searching.wait_until(lambda: searching.metric("plaudit_in_flight") == 0)


def test_responses_in_flight_are_limited_together(searching):
    with ExitStack() as stack:
        body = json.dumps({"items": [{"responses": [SLOW] * 10, "data_source": "regex"}]}).encode()
        for count in (1, 2):
            connection = stack.enter_context(searching.connect())
            connection.sendall(HEADER.replace(b"1000", str(len(body)).encode()) + body)
            searching.wait_until(lambda count=count: searching.metric("plaudit_in_flight") == count)
        refused = searching.request("/score", {"items": [ANSWER]})
        assert (refused.status, refused.json["cause"], refused.headers["retry-after"]) == (429, "busy", "1")
        assert "20 responses are in flight" in refused.json["message"]
