"""An engine that is a server, and the policy that it samples."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from plaudit.data.templates import load_template, load_tokenizer
from plaudit.models.trainable import load_policy
from plaudit.recipe import LoraSettings, ModelSettings, RolloutSettings
from plaudit.rollout.build import build_engine
from plaudit.rollout.engine import EngineSetup
from plaudit.world import World
from support.engine_contract import Subject, sharpen


@contextmanager
def served_subject(engine: str, model_folder: Path, server: dict[str, Any], lora: LoraSettings | None = None) -> Iterator[Subject]:
    """`server`: rollout.server. It has no weights before the first sync."""
    tokenizer = load_tokenizer(str(model_folder))
    settings = ModelSettings(path=str(model_folder), dtype="float32", lora=lora)
    model = sharpen(load_policy(settings, load_template(tokenizer, None), torch.device("cpu")).model)
    rollout = RolloutSettings(engine=engine, server=server)  # pyright: ignore[reportArgumentType]
    with closing(build_engine(EngineSetup(rollout, model, tokenizer, World.alone()))) as built:
        yield Subject(built, model, tokenizer)
