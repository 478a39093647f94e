"""Scalar models in blocks of layers: the division, what each block loads, and scores to the bit of the undivided model."""

import math
import re
import shutil
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from plaudit.errors import RecipeError
from plaudit.models.attention import packed_arguments
from plaudit.models.fused import can_fuse
from plaudit.models.layer_blocks import divide_layers
from plaudit.models.lora import attach_lora
from plaudit.models.scalar import ScalarModel, batches_of, load_scalar, scalar_blocks
from plaudit.recipe import LoraSettings
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.divided import BlockInput
from plaudit.rollout.native.scoring_pass import ScoringPass
from support.models import make_classifier

CPU = torch.device("cpu")
SEQUENCES = [list(range(3, 3 + n)) for n in (9, 30, 1, 17, 64, 5)]


# The division --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "before", "after", "lengths"),
    [
        ([10] * 8, 0, 0, [4, 4]),
        ([10] * 8, 20, 0, [3, 5]),
        ([10] * 8, 0, 40, [6, 2]),
        ([10] * 3, 100, 100, [1, 1, 1]),
        ([50, 10, 10, 10, 10, 10], 0, 0, [1, 5]),
    ],
)
def test_layers_are_divided_by_their_bytes(layers, before, after, lengths):
    blocks = divide_layers(layers, len(lengths), before=before, after=after)
    assert [len(block) for block in blocks] == lengths
    assert [i for block in blocks for i in block] == list(range(len(layers)))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_largest_block_is_as_small_as_possible(count):
    layers, before, after = [7, 3, 9, 1, 1, 8, 2, 6], 11, 5
    possible = [(0, *ends, len(layers)) for ends in combinations(range(1, len(layers)), count - 1)]

    def largest(ends: tuple[int, ...]) -> int:
        sizes = [sum(layers[begin:end]) for begin, end in pairwise(ends)]
        return max(sizes[0] + before, sizes[-1] + after, *sizes)

    blocks = divide_layers(layers, count, before=before, after=after)
    assert largest((0, *(block.stop for block in blocks))) == min(map(largest, possible))


# Blocks of a model ---------------------------------------------------------------------------------------------------


def settings_of(folder: Path, ranks: int = 2, **settings) -> RewardModel:
    return RewardModel(path=str(folder), rank=tuple(range(ranks)), **{"device": "cpu", **settings})


def attached(model: ScalarModel) -> ScalarModel:
    """As it scores: with fused layers, if its family has them."""
    if can_fuse(model.decoder):
        model.states = ScoringPass(model.decoder)
    return model


def score_in_blocks(blocks: list[ScalarModel], sequences: list[list[int]], device: torch.device = CPU) -> np.ndarray:
    """Hidden states pass from block to block as they do between processes."""
    values = np.empty(len(sequences), dtype=np.float32)
    for indices, batch in batches_of(sequences, device, 70):
        result = blocks[0].run_block(batch, None)
        for block in blocks[1:]:
            result = block.run_block(*BlockInput.of(batch, result).on(device))
        values[indices] = result.cpu()
    return values


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def classifier(request, tiny_models, tmp_path_factory) -> Path:
    return five_layers(tiny_models[request.param], tmp_path_factory.mktemp("any") / request.param)


def five_layers(source: Path, folder: Path, **changes) -> Path:
    return make_classifier(source, folder, num_hidden_layers=5, layer_types=["full_attention"] * 5, **changes)


def require_same_scores(settings: RewardModel, *, fused: bool = True, device: torch.device = CPU) -> list[ScalarModel]:
    """The blocks, whose scores have the bits of the undivided model's."""
    use = attached if fused else (lambda model: model)
    whole = use(load_scalar(settings, device)).score(SEQUENCES, tokens_per_pass=70)
    blocks = [use(load_scalar(settings, device, block)) for block in scalar_blocks(settings)]
    assert len(set(whole)) == len(whole)
    assert score_in_blocks(blocks, SEQUENCES, device).tobytes() == whole.tobytes()
    return blocks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_score_to_the_bit_as_the_undivided_model(classifier, dtype):
    require_same_scores(settings_of(classifier, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_are_not_fused(tiny_models, tmp_path, dtype):
    require_same_scores(settings_of(five_layers(tiny_models["llama"], tmp_path / "rm"), dtype=dtype), fused=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_on_a_gpu(classifier, dtype):
    require_same_scores(settings_of(classifier, 3, dtype=dtype, device="cuda"), device=torch.device("cuda"))


@pytest.mark.parametrize("kind", ["gemma", "qwen3_moe"])
def test_other_families(kind, tmp_path):
    """Scaled embeddings, which later blocks have none of; experts, whose weights are stored one by one and loaded as one."""
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 16, "num_labels": 1, "pad_token_id": 0}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if kind == "qwen3_moe" else {}
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **sizes, **more, **experts)).save_pretrained(tmp_path)
    require_same_scores(settings_of(tmp_path, 3, dtype="bfloat16"))


def test_a_value_head_next_to_a_causal_model(tiny_models, tmp_path):
    folder = shutil.copytree(tiny_models["qwen2"], tmp_path / "rm")
    torch.manual_seed(0)
    save_file(
        {"v_head.summary.weight": torch.randn(1, 64), "v_head.summary.bias": torch.randn(1)}, folder / "value_head.safetensors"
    )
    blocks = require_same_scores(settings_of(folder, dtype="bfloat16"))
    assert [sum(p.numel() for p in block.parameters()) for block in blocks] == held_by_name(folder, 1)


def test_an_adapter_is_merged_block_by_block(tiny_models, tmp_path):
    base = five_layers(tiny_models["llama"], tmp_path / "base")
    model: Any = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    peft = attach_lora(model, LoraSettings(rank=2), 0, head="score")
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    peft.save_pretrained(str(tmp_path / "adapter"))
    blocks = require_same_scores(settings_of(tmp_path / "adapter"))
    assert (score_in_blocks(blocks, SEQUENCES) != load_scalar(settings_of(base), CPU).score(SEQUENCES)).all()


# What a block has ----------------------------------------------------------------------------------------------------


def held_by_name(folder: Path, first_layers: int) -> list[int]:
    """Parameters of the blocks of a folder with two, by their names: of the first, with its number of layers, and of the last."""
    counts = [0, 1]  # a head's bias, which is zero where none is stored
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            layer = re.search(r"layers\.(\d+)\.", name)
            if name != "lm_head.weight":
                later = int(layer[1]) >= first_layers if layer else "embed" not in name
                counts[later] += math.prod(tensors.get_slice(name).get_shape())
    if (folder / "value_head.safetensors").exists():
        counts[1] += 64
    return counts


def test_a_block_has_its_own_weights_and_no_others(tiny_models, tmp_path):
    settings = settings_of(five_layers(tiny_models["llama"], tmp_path / "rm"))
    blocks = scalar_blocks(settings)
    models = [load_scalar(settings, CPU, block) for block in blocks]
    held = [sum(p.numel() for p in model.parameters()) for model in models]
    assert held == held_by_name(tmp_path / "rm", len(blocks[0].layers))
    assert [block.parameters for block in blocks] == [held[0], held[1] - 1]
    assert max(held) < 0.65 * sum(held)
    assert all(parameter.device.type == "cpu" for model in models for parameter in model.parameters())


def test_weights_of_other_blocks_are_never_read(tiny_models, tmp_path):
    """A folder without the last layer's weights is enough for the first block, and not for the last."""
    folder = five_layers(tiny_models["llama"], tmp_path / "rm")
    weights = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if ".layers.4." not in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = settings_of(folder)
    first, last = scalar_blocks(settings)
    load_scalar(settings, CPU, first)
    with pytest.raises(RecipeError, match=r"weights are missing.*layers\.4\."):
        load_scalar(settings, CPU, last)


# Models that cannot be divided ---------------------------------------------------------------------------------------


def test_more_ranks_than_layers(tiny_models, tmp_path):
    settings = settings_of(make_classifier(tiny_models["llama"], tmp_path / "rm"), 3)
    with pytest.raises(RecipeError, match=r"rm: model\.rank has 3 ranks, but the model has only 2 layers"):
        scalar_blocks(settings)


def test_a_decoder_of_another_form(tmp_path):
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("gpt_neox", **sizes, num_labels=1, bos_token_id=0, eos_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"GPTNeoXForSequenceClassification cannot be divided.*model\.rank: 0"):
        scalar_blocks(settings_of(tmp_path))


def test_layers_that_exchange_more_than_hidden_states(tiny_models, tmp_path, monkeypatch):
    settings = settings_of(make_classifier(tiny_models["llama"], tmp_path / "rm"))
    first, last = (load_scalar(settings, CPU, block).decoder for block in scalar_blocks(settings))
    [(_, batch)] = batches_of([[1, 2, 3]], CPU, 70)
    given = {**packed_arguments(batch), "use_cache": False}
    with pytest.raises(RecipeError, match="it is called with per_layer_inputs besides hidden states"):
        last(**given, per_layer_inputs=torch.zeros(1))
    forward = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda *arguments, **named: (forward(*arguments, **named), 0))
    with pytest.raises(RecipeError, match="it returns more than hidden states"):
        first(**given)
