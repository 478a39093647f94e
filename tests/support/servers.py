"""Servers of judges: launched by plaudit, and the stand-in of the documentation."""

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.launch import LaunchedServer
from support.paths import REPOSITORY


def launched(program: Path, *arguments: str, limits: ModelLimits | None = None, stop_s: float = 10.0, **settings) -> LaunchedServer:
    folder = program.parent
    given = [*arguments, f"--starts {folder / 'starts.jsonl'}"]
    model = RewardModel.model_validate({"placement": "launch", "path": "models/judge", "arguments": given, **settings})
    limits = limits or ModelLimits(backoff_s=0.01, retries=2)
    return LaunchedServer(model, program=[sys.executable, str(program)], log=folder / "server.log", limits=limits, stop_s=stop_s)


@contextmanager
def stand_in_judge(key: str | None = None) -> Iterator[str]:
    """The server in docs/reward_models/stand_in_judge.py; yields its address."""
    spec = importlib.util.spec_from_file_location("stand_in_judge", REPOSITORY / "docs/reward_models/stand_in_judge.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = module.server(0, key)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
