"""`plaudit view` over HTTP, and as a file."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from plaudit.report.pages import ASSETS
from plaudit.viewing.app import make_app
from plaudit.viewing.export import write_page
from plaudit.viewing.sources import open_source
from plaudit.viewing.viewer import Viewer
from support.made_runs import make_run, scored_group

HOSTILE = "</script><script>alert(1)</script>\x1b[2J\u202eabc"


@pytest.fixture
def viewer(tmp_path) -> Viewer:
    group = scored_group("p", [HOSTILE, "2"], [1.0, 0.0])
    return Viewer([open_source(make_run(tmp_path / "made", {1: [group], 2: [group]}))])


def client(viewer: Viewer, **settings) -> TestClient:
    return TestClient(make_app(viewer, **settings), base_url="http://127.0.0.1:8322")


def test_pages_and_data_are_served_with_a_strict_policy(viewer):
    http = client(viewer)
    for path in (
        "/",
        *(f"/page/{name}" for name in ASSETS),
        "/api/runs",
        "/api/runs/0/metrics",
        "/api/runs/0/train/1",
        "/api/runs/0/train/1/0",
    ):
        answer = http.get(path)
        assert answer.status_code == 200, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert http.get("/api/runs/0/train/1/0").json()["response"] == HOSTILE
    assert http.get("/api/runs/0/search", params={"text": "alert"}).json()["hits"][0]["found"] == "alert"


def test_what_is_not_there_is_one_line(viewer):
    http = client(viewer)
    for path in (
        "/api/runs/7/metrics",
        "/api/runs/0/train/99",
        "/api/runs/0/train/1/99",
        "/api/runs/0/test/1",
        "/page/../pages.py",
    ):
        answer = http.get(path)
        assert answer.status_code == 404, path
    assert http.get("/api/runs/0/train/99").json()["message"].endswith("there are no train samples of step 99")
    assert http.get("/api/runs/0/search", params={"text": "(", "is_regex": True}).status_code == 400
    assert http.post("/api/runs").status_code == 405


def test_what_is_no_step_or_row_is_one_line(viewer):
    http = client(viewer)
    for path in (
        "/api/runs/0/train/NaN",
        f"/api/runs/0/train/{'9' * 400}",
        f"/api/runs/0/train/1/{'9' * 30}",
        "/api/runs/0/train/1/-1",
    ):
        answer = http.get(path)
        assert answer.status_code in (400, 404), path
        assert answer.json()["message"], path


def test_a_trace_with_numbers_that_json_has_not_is_shown(tmp_path):
    group = scored_group("p", ["1", "2"], [1.0, 0.0], trace={"logprob": float("nan"), "most": [float("inf")]})
    viewer = Viewer([open_source(make_run(tmp_path / "made", {1: [group]}))])
    answer = client(viewer).get("/api/runs/0/train/1/0").json()
    assert answer["rewards"]["tone"]["trace"] == {"logprob": "NaN", "most": ["Infinity"]}
    assert "all samples" in write_page(viewer, tmp_path / "a.html", max_bytes=5_000_000)


def test_a_website_that_points_its_name_here_gets_nothing(viewer):
    assert client(viewer).get("/api/runs", headers={"Host": "evil.example:8322"}).status_code == 403
    for own in ("localhost:8322", "LOCALHOST", "127.0.0.2:1", "[::1]", "[::1]:8322"):
        assert client(viewer).get("/api/runs", headers={"Host": own}).status_code == 200, own
    for other in ("127.0.0.1.evil.example", "evil.example", "localhost.evil.example:8322", "192.168.0.7:8322"):
        assert client(viewer).get("/api/runs", headers={"Host": other}).status_code == 403, other
    assert client(viewer, local_only=False).get("/api/runs", headers={"Host": "box.example"}).status_code == 200


def test_with_a_token_only_the_pages_are_public(viewer):
    http = client(viewer, token="opensesame")
    assert http.get("/").status_code == 200
    assert http.get("/api/runs").status_code == 401
    assert http.get("/api/runs", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert http.get("/api/runs", headers={"Authorization": "Bearer opensesame"}).status_code == 200


def test_the_file_is_self_contained_and_its_text_cannot_end_its_script(viewer, tmp_path):
    line = write_page(viewer, tmp_path / "a.html", max_bytes=5_000_000)
    text = (tmp_path / "a.html").read_text()
    assert "all samples" in line
    assert "alert(1)" not in text  # compressed
    assert text.count("</script>") == 2
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_file_that_gets_too_large_leaves_steps_out_and_says_so(viewer, tmp_path):
    everything = write_page(viewer, tmp_path / "a.html", max_bytes=5_000_000)
    size = (tmp_path / "a.html").stat().st_size
    line = write_page(viewer, tmp_path / "b.html", max_bytes=size - 200)
    assert "all samples" in everything
    assert "samples of 1 of 2 steps" in line
    assert "samples of 1 of 2 steps" in (tmp_path / "b.html").read_text()
    assert embedded_answers(tmp_path / "b.html")["runs/0/steps"]["train"] == [2]  # the newest one stays


def test_a_file_says_which_steps_cannot_be_read(viewer, tmp_path):
    (tmp_path / "made/samples/train_000001.parquet").write_bytes(b"broken")
    viewer.diagnostics(0)  # as a page that was open before
    line = write_page(viewer, tmp_path / "a.html", max_bytes=5_000_000)
    assert line.endswith("samples of 1 of 2 steps (1 cannot be read)")
    (problem,) = embedded_answers(tmp_path / "a.html")["runs/0/diagnostics"]["problems"]
    assert "train_000001.parquet cannot be read" in problem


def test_the_file_of_a_dump_has_all_of_its_curve(tmp_path, monkeypatch):
    for step in range(1, 6):
        (tmp_path / f"{step}.jsonl").write_text(json.dumps({"input": "user\nHi", "output": "a", "score": 1.0}) + "\n")
    # A clock that ticks whenever it is read: a step for each request.
    monkeypatch.setattr("plaudit.viewing.viewer.time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr("plaudit.viewing.viewer.BUDGET_S", 2)
    viewer = Viewer([open_source(tmp_path)])
    write_page(viewer, tmp_path / "a.html", max_bytes=5_000_000)
    assert embedded_answers(tmp_path / "a.html")["runs/0/metrics"]["series"]["reward"]["x"] == [1, 2, 3, 4, 5]


def embedded_answers(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text().partition('id="embedded">')[2].partition("</script>")[0])["answers"]
