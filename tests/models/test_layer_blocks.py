"""Scalar models in blocks of layers: the division, what each block loads, and scores to the bit of the undivided model."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from plaudit.models.fused import can_fuse
from plaudit.models.layer_blocks import divide_layers
from plaudit.models.scalar import ScalarModel, batches_of, load_scalar, scalar_blocks
from plaudit.recipe.reward_models import RewardModel
from plaudit.rollout.native.scoring_pass import ScoringPass
from support.models import make_classifier

CPU = torch.device("cpu")
SEQUENCES = [list(range(3, 3 + n)) for n in (9, 30, 1, 17, 64, 5)]


# The division --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "count", "before", "after", "lengths"),
    [
        ([1] * 8, 2, 0, 0, [4, 4]),
        ([10] * 8, 2, 20, 0, [3, 5]),
        ([10] * 8, 2, 0, 40, [6, 2]),
        ([10] * 4, 4, 100, 100, [1, 1, 1, 1]),
        ([10] * 9, 3, 0, 0, [3, 3, 3]),
        ([50, 10, 10, 10, 10, 10], 2, 0, 0, [1, 5]),
        ([10, 10, 10, 10, 10, 50], 3, 0, 0, [2, 3, 1]),
    ],
)
def test_the_largest_block_is_as_small_as_possible(layers, count, before, after, lengths):
    blocks = divide_layers(layers, count, before=before, after=after)
    sizes = [sum(layers[i] for i in block) for block in blocks]
    sizes[0] += before
    sizes[-1] += after
    wanted, at = [], 0
    for n in lengths:
        wanted.append(sum(layers[at : at + n]))
        at += n
    wanted[0] += before
    wanted[-1] += after
    assert max(sizes) == max(wanted)
    assert blocks[0].start == 0
    assert blocks[-1].stop == len(layers)
    assert all(a.stop == b.start for a, b in pairwise(blocks))
    assert all(len(block) for block in blocks)


# Blocks of a model ---------------------------------------------------------------------------------------------------


def settings_of(folder: Path, ranks: int = 2, **settings) -> RewardModel:
    return RewardModel(path=str(folder), device="cpu", rank=tuple(range(ranks)), **settings)


def attached(model: ScalarModel) -> ScalarModel:
    """As it scores: with fused layers, if its family has them."""
    if can_fuse(model.decoder):
        model.states = ScoringPass(model.decoder)
    return model


def score_in_blocks(blocks: list[ScalarModel], sequences: list[list[int]]) -> np.ndarray:
    values = np.empty(len(sequences), dtype=np.float32)
    for indices, batch in batches_of(sequences, CPU, tokens_per_pass=70):
        states = None
        for block in blocks:
            states = block.run_block(batch, states)
        assert states is not None
        values[indices] = states
    return values


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def classifier(request, tiny_models, tmp_path_factory) -> Path:
    return five_layers(tiny_models[request.param], tmp_path_factory.mktemp("any") / request.param)


def five_layers(source: Path, folder: Path, **changes) -> Path:
    return make_classifier(source, folder, num_hidden_layers=5, layer_types=["full_attention"] * 5, **changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fused", [True, False])
def test_blocks_score_to_the_bit_as_the_undivided_model(classifier, dtype, fused):
    settings = settings_of(classifier, 3, dtype=dtype)
    use = attached if fused else (lambda model: model)
    whole = use(load_scalar(settings, CPU)).score(SEQUENCES, tokens_per_pass=70)
    blocks = [use(load_scalar(settings, CPU, block)) for block in scalar_blocks(settings, CPU)]
    scores = score_in_blocks(blocks, SEQUENCES)
    assert len(set(whole)) == len(whole)
    assert scores.tobytes() == whole.tobytes()
