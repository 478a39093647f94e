"""Scalar models whose layers several processes have: scores to the bit of the undivided model, and faults of any of them."""

from pathlib import Path

import pytest

from plaudit.models.weights import RESIDENT_MODELS
from support.models import make_classifier
from support.peers import model, score


@pytest.fixture(scope="module")
def classifier(tiny_models, tmp_path_factory) -> Path:
    return make_classifier(tiny_models["llama"], tmp_path_factory.mktemp("divided") / "rm", num_hidden_layers=5)


@pytest.mark.parametrize(
    ("size", "ranks", "placement"), [(2, [0, 1], "resident"), (3, [2, 0, 1], "offload"), (3, [1, 2], "resident")]
)
def test_scores_have_the_bits_of_the_undivided_model(classifier, size, ranks, placement):
    alone, counted_alone = score(1, [{"kind": "scalar_model", "model": model(classifier, placement)}])
    together, counted = score(size, [{"kind": "scalar_model", "model": model(classifier, placement, rank=ranks)}])
    assert together == alone
    assert counted == counted_alone
    assert RESIDENT_MODELS.models() == []
