"""Every engine passes the engine contract; with PLAUDIT_ENGINE=file.py:Class, that one does."""

import os
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plaudit.data.templates import load_template, load_tokenizer
from plaudit.models.trainable import load_policy
from plaudit.recipe import ModelSettings, RolloutSettings
from plaudit.rollout.build import build_engine
from plaudit.rollout.engine import EngineSetup
from plaudit.rollout.native.engine import NativeEngine
from plaudit.world import World
from support.engine_contract import EngineContract, Subject, sharpen
from support.paths import REPOSITORY

YOURS = os.environ.get("PLAUDIT_ENGINE")


def native(**settings: int) -> Callable[[PreTrainedModel, PreTrainedTokenizerBase], Subject]:
    def make(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Subject:
        return Subject(NativeEngine(model, tokenizer, **settings), model, tokenizer)

    return make


def native_on_a_copy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Subject:
    """On a separate copy of the model, which every sync has to update."""
    return Subject(NativeEngine(deepcopy(model), tokenizer), model, tokenizer)


def custom(reference: str) -> Callable[[PreTrainedModel, PreTrainedTokenizerBase], Subject]:
    """A user's engine, named as in a recipe."""

    def make(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Subject:
        setup = EngineSetup(RolloutSettings(engine=reference), model, tokenizer, World.alone())
        subject = Subject(build_engine(setup), model, tokenizer)
        subject.sync(0)
        return subject

    return make


ENGINES = {
    "native": native(),
    "native on a copy": native_on_a_copy,
    "native with 3 rows and blocks of 8": native(max_sequences=3, block_tokens=8),
    "docs/transformers_engine.py": custom(f"{REPOSITORY / 'docs/transformers_engine.py'}:TransformersEngine"),
}
if YOURS:
    ENGINES = {YOURS: custom(YOURS)}


@pytest.fixture(scope="module", params=ENGINES)
def subject(request, tiny_model) -> Subject:
    tokenizer = load_tokenizer(str(tiny_model))
    model_settings = ModelSettings(path=str(tiny_model), dtype="float32")
    policy = load_policy(model_settings, load_template(tokenizer, None), torch.device("cpu"))
    return ENGINES[request.param](sharpen(policy.model), tokenizer)


@pytest.mark.grid(2)
class TestContract(EngineContract):
    pass
