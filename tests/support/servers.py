"""A server launched for a judge."""

import sys
from pathlib import Path

from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.launch import LaunchedServer


def launched(program: Path, *arguments: str, limits: ModelLimits | None = None, stop_s: float = 10.0, **settings) -> LaunchedServer:
    folder = program.parent
    given = [*arguments, f"--starts {folder / 'starts.jsonl'}"]
    model = RewardModel.model_validate({"placement": "launch", "path": "models/judge", "arguments": given, **settings})
    limits = limits or ModelLimits(backoff_s=0.01, retries=2)
    return LaunchedServer(model, program=[sys.executable, str(program)], log=folder / "server.log", limits=limits, stop_s=stop_s)
