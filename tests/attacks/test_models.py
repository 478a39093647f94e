"""Model folders made to harm: pickled weights, paths out of the folder, code, and configs that cannot be true. Each is refused in
one line, before anything is loaded."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from plaudit.errors import PlauditError, RecipeError
from plaudit.models.attention import NAME
from plaudit.models.critic import load_critic
from plaudit.models.reference import Reference
from plaudit.models.scalar import load_scalar
from plaudit.models.trainable import load_pretrained
from plaudit.recipe import ModelSettings
from plaudit.recipe.reward_models import RewardModel
from support.damage import DAMAGES
from support.models import make_classifier
from support.recipes import rl_recipe, sft_recipe, write_recipe
from support.training import CPU, load

INDEX = "model.safetensors.index.json"


class Exploit:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


@pytest.fixture
def model(tmp_path, tiny_model) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def with_index(model: Path, name: object) -> Path:
    """The weights under another name, in an index."""
    weights = model / "model.safetensors"
    tensors = list(load_file(weights))
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}))
    weights.rename(model / "elsewhere.safetensors")
    return model


def with_pickled(model: Path, proof: Path) -> Path:
    """Weights that run code when they are unpickled, named by a safetensors index."""
    with_index(model, "model-00001.bin")
    (model / "model-00001.bin").write_bytes(pickle.dumps(Exploit(proof)))
    return model


def change(folder: Path, name: str = "config.json", **values: object) -> Path:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def loaded(path: Path):
    return load_pretrained(AutoModelForCausalLM, str(path), torch.float32, trust_remote_code=False)


def assert_one_line(result: tuple[int, str, str], expected: str) -> None:
    code, _, err = result
    assert code == 2, err
    assert "Traceback" not in err
    assert expected in err.strip().splitlines()[-1]


# Weights -------------------------------------------------------------------------------------------------------------


def test_pickled_weights_behind_an_index_are_refused_by_every_loader(tmp_path, tiny_model, model):
    proof = tmp_path / "code-was-run"
    policy = load(tiny_model)
    with_pickled(model, proof)
    scalar = make_classifier(tiny_model, tmp_path / "scalar")
    with_pickled(scalar, proof)
    adapter = tmp_path / "adapter"
    load(tiny_model, lora={"rank": 2, "merge_on_save": False}).save(adapter)
    change(adapter, "adapter_config.json", base_model_name_or_path=str(model))
    loaders = {
        "policy": lambda: load(model),
        "adapter": lambda: load(adapter),
        "critic": lambda: load_critic(ModelSettings(path=str(model)), policy.template, CPU),
        "reference": lambda: Reference(ModelSettings(path=str(tiny_model)), policy, path=str(model)),
        "reward model": lambda: load_scalar(RewardModel(path=str(scalar)), CPU),
    }
    for name, loader in loaders.items():
        with pytest.raises(RecipeError, match=r"\.bin'.*never pickled weights"):
            loader()
        assert not proof.exists(), name


@pytest.mark.parametrize("verb", ["sft", "rl", "doctor", "ask", "sample", "merge", "serve"])
def test_pickled_weights_behind_an_index_are_refused_by_every_command(
    tmp_path, tiny_model, model, plaudit, rows_file, prompts_file, verb
):
    proof = tmp_path / "code-was-run"
    with_pickled(model, proof)
    if verb in ("sft", "doctor"):
        command = [verb, write_recipe(tmp_path / "r.yaml", sft_recipe(model, rows_file, tmp_path / "run"))]
    elif verb == "rl":  # as the reference
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", {"kind": "exact"}, reference={"path": str(model)})
        tree["algorithm"] = {"kl_coefficient": 0.1}
        command = [verb, write_recipe(tmp_path / "r.yaml", tree)]
    elif verb == "merge":
        load(tiny_model, lora={"rank": 2, "merge_on_save": False}).save(tmp_path / "adapter")
        change(tmp_path / "adapter", "adapter_config.json", base_model_name_or_path=str(model))
        command = [verb, tmp_path / "adapter", "--out", tmp_path / "merged"]
    elif verb == "serve":
        reward = {"kind": "scalar_model", "model": {"path": str(model)}}
        command = [verb, write_recipe(tmp_path / "r.yaml", {"rewards": [reward]}), "--port", "0"]
    else:
        command = [verb, model, *(["?"] if verb == "ask" else [prompts_file, "--out", tmp_path / "out.jsonl"])]
    code, out, err = plaudit(*command)
    assert not proof.exists()
    if verb == "doctor":
        assert code == 1
        assert "pickled weights" in out
    else:
        assert_one_line((code, out, err), "pickled weights")


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors", "/etc/secret.safetensors", "sub/x.safetensors", "..", "..\\secret.safetensors",
        "C:\\x.safetensors", "x.safetensors\0.bin", ".hidden.safetensors", "./model.safetensors", "~/x.safetensors",
    ],
)  # fmt: skip
def test_an_index_names_files_of_its_folder_only(tmp_path, model, name):
    with_index(model, name)
    shutil.copy(model / "elsewhere.safetensors", tmp_path / "secret.safetensors")
    with pytest.raises(RecipeError, match="is not a file of this folder"):
        loaded(model)


@pytest.mark.parametrize("name", ["model.bin", "pytorch_model.bin", "weights.pt", "model.pkl", "model.safetensors.bin", "model"])
def test_an_index_names_safetensors_only(model, name):
    with pytest.raises(RecipeError, match="never pickled weights"):
        loaded(with_index(model, name))


@pytest.mark.parametrize(
    "content",
    [
        {"weight_map": 3},
        {"weight_map": []},
        {"weight_map": {}},
        {"weight_map": {"a": 1}},
        {"weight_map": {"a": ["b"]}},
        {},
        [],
        None,
        7,
    ],
)
def test_an_index_of_wrong_types_is_one_line(model, content):
    with_index(model, "x.safetensors")
    (model / INDEX).write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=INDEX):
        loaded(model)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_one_line(model, damage):
    DAMAGES[damage](with_index(model, "x.safetensors") / INDEX)
    with pytest.raises(RecipeError, match=INDEX):
        loaded(model)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_one_line(model, damage):
    DAMAGES[damage](model / "model.safetensors")
    with pytest.raises(RecipeError, match="model"):
        loaded(model)


def test_pickled_weights_named_safetensors_are_refused(tmp_path, model):
    proof = tmp_path / "code-was-run"
    (model / "model.safetensors").write_bytes(pickle.dumps(Exploit(proof)))
    with pytest.raises(RecipeError):
        loaded(model)
    assert not proof.exists()


def test_a_pipe_in_place_of_weights_does_not_block(model):
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    with pytest.raises(RecipeError, match="incomplete weights"):
        loaded(model)


def test_the_hubs_links_to_its_blobs_are_followed(tmp_path, model):
    """Its cache has snapshots/REVISION/NAME → ../../blobs/DIGEST, also for several files and an index."""
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    tensors = load_file(model / "model.safetensors")
    names = {name: f"model-0000{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == shard}, model / shard, metadata={"format": "pt"})
    (model / "model.safetensors").unlink()
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for i, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / f"{i:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040x}")
    for name, parameter in loaded(snapshot).state_dict().items():
        assert torch.equal(parameter, tensors[name])


# Config --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
@pytest.mark.parametrize("value", ["eager", "sdpa", "kernels-community/flash-attn"])
def test_a_config_does_not_choose_the_attention(model, name, value):
    """Another one would let packed sequences attend to each other, and `org/name` would be downloaded code."""
    modules: list[Any] = list(loaded(change(model, **{name: value})).modules())
    assert {module.config._attn_implementation for module in modules if hasattr(module, "config")} == {NAME}


def test_code_in_a_model_folder_is_not_run_unless_trusted(tmp_path, model):
    proof = tmp_path / "code-was-run"
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(proof)!r})\n")
    mapped = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}
    change(model, auto_map=mapped)
    change(model, "tokenizer_config.json", auto_map=mapped)
    load(model)  # as the class that it names
    assert not proof.exists()
    change(model, model_type="unheard_of")
    with pytest.raises(RecipeError, match="custom code"):
        load(model)
    assert not proof.exists()


ODD = {
    "hidden_size": [-64, 0, "64", None, 1e9, 10**9, 10**30, True, [], {}],
    "num_hidden_layers": [-1, 0, 10**5, 10**9, "2", 2.5],
    "num_attention_heads": [0, 7, -4, "4", 10**9],
    "num_key_value_heads": [0, 3, "2", -1],
    "head_dim": [-1, 0, "x", 10**9],
    "intermediate_size": [0, -3, "160", 2**31 - 1],
    "vocab_size": [-1, 0, 1.5, "320", 10**12, 2**31 - 1],
    "max_position_embeddings": [-5, "2048"],
    "rms_norm_eps": ["a", float("nan"), float("inf"), -1, 7],
    "attention_dropout": [7, -1, "none"],
    "rope_parameters": [[], 3, {"rope_type": "no_such"}, {"rope_theta": "x", "rope_type": "default"}],
    "architectures": [5, [7], {}],
    "hidden_act": ["no_such", None, 3],
    "model_type": [3, None, "no_such"],
    "num_labels": [-1, 10**9, "one"],
    "id2label": [5],
    "transformers_weights": ["../x.safetensors", "/etc/passwd", 5],
    "quantization_config": [5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ODD.items() for value in values], ids=str)
@pytest.mark.grid(16)
def test_a_config_that_cannot_be_true_is_one_line(model, name, value):
    with pytest.raises(PlauditError) as caught:
        load(change(model, **{name: value}))
    assert "\n" not in str(caught.value)
    assert str(model) in str(caught.value)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
)
@pytest.mark.grid(12)
def test_a_damaged_file_of_a_model_is_one_line(tmp_path, model, rows_file, plaudit, name, damage):
    """Through the command; or the model works without that file."""
    DAMAGES[damage](model / name)
    code, _, err = plaudit(
        "sft", write_recipe(tmp_path / "r.yaml", sft_recipe(model, rows_file, tmp_path / "run", run={"max_steps": 1}))
    )
    assert "Traceback" not in err
    assert code == 2 or name in ("generation_config.json", "tokenizer_config.json")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_file_of_an_adapter_is_one_line(tmp_path, tiny_model, damage, name):
    load(tiny_model, lora={"rank": 2, "merge_on_save": False}).save(tmp_path / "adapter")
    DAMAGES[damage](tmp_path / "adapter" / name)
    with pytest.raises(PlauditError) as caught:
        loaded(tmp_path / "adapter")
    assert "\n" not in str(caught.value)


def test_an_adapter_cannot_import_a_module(tmp_path, tiny_model):
    load(tiny_model, lora={"rank": 2, "merge_on_save": False}).save(tmp_path / "adapter")
    change(tmp_path / "adapter", "adapter_config.json", megatron_config={"x": 1}, megatron_core="antigravity")
    with pytest.raises(RecipeError, match="megatron_config"):
        loaded(tmp_path / "adapter")


def test_a_folder_that_is_both_a_model_and_an_adapter_is_refused(tmp_path, model):
    """transformers would load the base that the adapter names instead of the folder's own weights."""
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../other", "peft_type": "LORA"}))
    with pytest.raises(RecipeError, match=r"has both config.json and adapter_config.json"):
        loaded(model)
