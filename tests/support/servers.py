"""Servers of judges: launched by plaudit, and the stand-in of the documentation."""

import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.launch import LaunchedModel
from support.paths import REPOSITORY


def starts(program: Path) -> list[dict]:
    """Each start of the program."""
    return [json.loads(line) for line in (program.parent / "starts.jsonl").read_text().splitlines()]


def events(program: Path) -> list[str]:
    """The paths of its requests, in order."""
    return [json.loads(line)["path"] for line in (program.parent / "events.jsonl").read_text().splitlines()]


def launched(program: Path, *arguments: str, limits: ModelLimits | None = None, stop_s: float = 10.0, **settings) -> LaunchedModel:
    folder = program.parent
    given = [*arguments, f"--starts {folder / 'starts.jsonl'}", f"--events {folder / 'events.jsonl'}"]
    model = RewardModel.model_validate({"placement": "launch", "path": "models/judge", "arguments": given, **settings})
    limits = limits or ModelLimits(backoff_s=0.01, retries=2)
    return LaunchedModel(model, program=[sys.executable, str(program)], log=folder / "server.log", limits=limits, stop_s=stop_s)


def length_judge(program: Path, **model: Any) -> dict[str, Any]:
    """A judge that scores what the program repeats: the length of the response."""
    template = program.parent / "length.jinja"
    template.write_text("[[{{ response | length }}]]")
    arguments = [f"--{kind} {program.parent / kind}.jsonl" for kind in ("starts", "events")]
    command = f"{sys.executable} {program}"
    settings = {"path": "models/judge", "placement": "launch", "program": command, "arguments": arguments, **model}
    return {"kind": "judge", "template": str(template), "parser": "regex", "pattern": r"\[\[(\d+)\]\]", "model": settings}


def load_stand_in_judge() -> ModuleType:
    """docs/reward_models/stand_in_judge.py, each time anew."""
    spec = importlib.util.spec_from_file_location("stand_in_judge", REPOSITORY / "docs/reward_models/stand_in_judge.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def stand_in_judge(key: str | None = None, answer_to: Callable[[str], str] | None = None) -> Iterator[str]:
    """The server in docs/reward_models/stand_in_judge.py, or one with other answers to prompts; yields its address."""
    module = load_stand_in_judge()
    if answer_to is not None:
        module.answer_to = answer_to
    server = module.server(0, key)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def similarity_service(cosine: Callable[[str, str], float]) -> Iterator[tuple[str, list[dict]]]:
    """A service that compares two texts, as recipes/several_rms/bge_similarity.py calls it; yields its address and what it was
    sent."""
    received: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps({"sim": cosine(received[-1]["sent1"], received[-1]["sent2"])}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
