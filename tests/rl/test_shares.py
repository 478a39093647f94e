"""Prompts dealt to processes by the lengths of earlier responses, which a checkpoint keeps in little space."""

import json

import numpy as np
import torch

from plaudit.data.prompts import EncodedPrompt
from plaudit.rl.shares import PromptShares
from plaudit.types import Group, Prompt, Sample, ScoredGroup
from plaudit.world import World


def prompts(count: int) -> list[EncodedPrompt]:
    return [EncodedPrompt(Prompt(id=f"p{i}", messages=[]), np.zeros(10, np.int32)) for i in range(count)]


def sampled(one: EncodedPrompt, length: int) -> ScoredGroup:
    tokens, none = np.ones(length, np.int32), np.zeros(length, np.float32)
    sample = Sample(one.prompt.id, 0, tokens, "", "finished", none, None, 0)
    return ScoredGroup(Group(one.prompt, one.tokens, (sample,)), (), {})


def shares(rank: int, recurring: list[EncodedPrompt], size: int = 2) -> PromptShares:
    return PromptShares(World(rank, size, torch.device("cpu")), recurring)


def dealt(of: list[PromptShares], given: list[EncodedPrompt]) -> list[list[str]]:
    return [[one.prompt.id for one in each.own(given, 4)] for each in of]


def test_a_resumed_run_deals_as_it_would_have():
    known = prompts(6)
    before = [shares(rank, known) for rank in (0, 1)]
    for each in before:
        each.observe([sampled(one, length) for one, length in zip(known, (90, 1, 1, 1, 1, 0), strict=True)], training=True)
    after = [shares(rank, known) for rank in (0, 1)]
    for old, new in zip(before, after, strict=True):
        new.load_state(json.loads(json.dumps(old.state())))
    assert dealt(after, known) == dealt(before, known)
    assert ["p0"] in dealt(after, known), "the long one is as much work as all the others"
    fresh = [shares(rank, known) for rank in (0, 1)]
    assert dealt(fresh, known) != dealt(after, known)


def test_the_state_of_many_prompts_is_small():
    """Less than three bytes a prompt."""
    known = prompts(10_000)
    each, lengths = shares(0, known), np.random.default_rng(0).integers(0, 4096, len(known))
    each.observe([sampled(one, length) for one, length in zip(known, lengths, strict=True)], training=True)
    assert len(json.dumps(each.state())) < 3 * len(known)


def test_a_checkpoint_of_another_version_or_of_one_process_is_no_error():
    each = shares(0, prompts(3))
    for state in ({}, {"lengths": {"p0": 3}, "mean": 5}):
        each.load_state(state)
    alone = shares(0, prompts(3), size=1)
    alone.load_state(each.state())
    assert alone.state() == {}
