"""Adapter folders: wherever a model is named, a LoRA adapter stands for its base with the adapter merged in."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from plaudit.data.pack import pack
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.errors import PlauditError, RecipeError
from plaudit.files import model_fingerprint, weights_fingerprint
from plaudit.lora_folder import LoraFolder, read_lora_folder, with_tokenizer, with_weights
from plaudit.models.classifier import load_classifier
from plaudit.models.folder import architecture, read_config
from plaudit.models.logprobs import target_logprobs
from plaudit.models.memory import count_parameters
from plaudit.models.scalar import load_scalar
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.recipe import LoraSettings, ModelSettings
from plaudit.recipe.reward_models import RewardModel
from plaudit.types import Example
from support.merged import compute_by_peft
from support.recipes import rl_recipe, sft_recipe, train_rl, train_sft, write_recipe

CPU = torch.device("cpu")
SEQUENCE = Example(np.array([5, 9, 200, 31, 7], dtype=np.int32), np.array([False, True, True, True, True]))


def logprobs(policy: TrainableModel) -> torch.Tensor:
    return target_logprobs(policy.model.eval(), pack([SEQUENCE], CPU)).logprobs_N


def shift_adapters(trained: TrainableModel) -> None:
    """New adapters are zero; give them weights, as training does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in trained.trainable():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def template(tiny_model):
    return load_template(load_tokenizer(str(tiny_model)), None)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def trained(request, tiny_model, template, tmp_path_factory) -> tuple[Path, Path]:
    """A trained model, saved as an adapter and as a complete model. The merged weights that bf16 is trained with are rounded with
    noise. Here peft computes it, and they are rounded to the nearest, as whoever merges the adapter rounds them."""
    folder = tmp_path_factory.mktemp("lora")
    lora = LoraSettings(rank=4, alpha=8.0, merge_on_save=False)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "bfloat16":
            patch.setattr("plaudit.models.trainable.merge_adapters", compute_by_peft)
        policy = load_policy(ModelSettings(path=str(tiny_model), dtype=request.param, lora=lora), template, CPU)
    shift_adapters(policy)
    policy.save(folder / "adapter")
    policy.lora = lora.model_copy(update={"merge_on_save": True})
    policy.save(folder / "merged")
    return folder / "adapter", folder / "merged"


@pytest.fixture(scope="module")
def reward_adapter(tiny_model, template, tmp_path_factory) -> tuple[Path, Path]:
    """The same for a reward model."""
    folder = tmp_path_factory.mktemp("reward")
    lora = LoraSettings(rank=4, merge_on_save=False)
    classifier = load_classifier(ModelSettings(path=str(tiny_model), lora=lora), template, CPU)
    shift_adapters(classifier)
    classifier.save(folder / "adapter")
    classifier.lora = lora.model_copy(update={"merge_on_save": True})
    classifier.save(folder / "merged")
    return folder / "adapter", folder / "merged"


def dtype_of(folder: Path) -> str:
    return str(next(iter(load_file(folder / "model.safetensors").values())).dtype).removeprefix("torch.")


def test_merge_writes_what_peft_merges_and_what_training_would_have_saved(plaudit, trained, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter, merged = trained
    code, out, err = plaudit("merge", adapter, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "merged in" in out
    written = load_file(tmp_path / "out/model.safetensors")
    expected = load_file(merged / "model.safetensors")
    if dtype_of(merged) == "bfloat16":  # the base is saved in fp32: merged there, it is the finer of the two
        code, _, _ = plaudit("merge", adapter, "--out", tmp_path / "bf16", "--dtype", "bfloat16")
        assert code == 0
        written = load_file(tmp_path / "bf16/model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)

    base = AutoModelForCausalLM.from_pretrained(read_lora_folder(adapter).base, dtype=next(iter(expected.values())).dtype)  # pyright: ignore
    by_peft = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().state_dict()  # pyright: ignore
    assert all(torch.equal(by_peft[name], expected[name]) for name in expected)
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_text() == (merged / name).read_text(), name
    ignored = {"dtype", "transformers_version", "_name_or_path"}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", merged)]
    assert {k: v for k, v in configs[0].items() if k not in ignored} == {k: v for k, v in configs[1].items() if k not in ignored}


def test_a_policy_loads_from_an_adapter(trained, template):
    adapter, merged = trained
    dtype = dtype_of(merged)
    policies = [load_policy(ModelSettings(path=str(path), dtype=dtype), template, CPU) for path in (adapter, merged)]  # pyright: ignore
    for policy in policies:
        assert all(p.requires_grad for p in policy.model.parameters())
        assert not any("lora" in name for name, _ in policy.model.named_parameters())
    assert torch.equal(*map(logprobs, policies))


def test_a_new_lora_trains_an_update_of_the_merged_model(trained, template):
    """So the reference, the policy without its adapters, is the model that training starts from."""
    adapter, merged = trained
    policy = load_policy(ModelSettings(path=str(adapter), dtype=dtype_of(merged), lora=LoraSettings(rank=2)), template, CPU)  # pyright: ignore
    full = load_policy(ModelSettings(path=str(merged), dtype=dtype_of(merged)), template, CPU)  # pyright: ignore
    assert torch.equal(logprobs(policy), logprobs(full))
    assert {name.split(".")[-2] for name, _ in policy.trainable()} == {"default"}
    assert policy.peft is not None


def test_a_reward_model_scores_from_an_adapter(reward_adapter, plaudit, tmp_path):
    adapter, merged = reward_adapter
    assert architecture(read_config(str(adapter))) == "LlamaForSequenceClassification"
    assert read_config(str(adapter)).num_labels == 1
    sequences = [[5, 9, 200], [31, 7]]
    scores = [load_scalar(RewardModel(path=str(path)), CPU).score(sequences).tolist() for path in (adapter, merged)]
    assert scores[0] == scores[1]
    code, _, err = plaudit("merge", adapter, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    written, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", merged))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_a_reward_model_may_start_from_a_policy_s_adapter(trained, template):
    adapter, merged = trained
    one, other = (
        load_classifier(ModelSettings(path=str(path), dtype=dtype_of(merged)), template, CPU).model.state_dict()  # pyright: ignore
        for path in (adapter, merged)
    )
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_reward_model_s_adapter_is_no_policy(reward_adapter, plaudit, tmp_path, rows_file):
    adapter, _ = reward_adapter
    recipe = write_recipe(tmp_path / "sft.yaml", sft_recipe(adapter, rows_file, tmp_path / "run"))
    code, _, err = plaudit("sft", recipe)
    assert code == 2
    assert f"model.path: {adapter} is a reward model (a LoRA adapter with a score head)" in err


def test_verbs_accept_an_adapter(tiny_model, plaudit, tmp_path, prompts_file, reward_adapter, rows_file):
    """Trained with merge_on_save: false, sampled, checked by the doctor, trained further; also as reference and reward model."""
    tree = sft_recipe(tiny_model, rows_file, tmp_path / "sft", run={"max_steps": 1})
    tree["model"]["lora"] = {"rank": 2, "merge_on_save": False}
    first = train_sft(write_recipe(tmp_path / "sft.yaml", tree))
    assert (first / "adapter_config.json").exists()
    _, out, _ = plaudit("sft", tmp_path / "sft.yaml")  # finished: it only says where the results are
    assert out.splitlines()[-1] == f"merge it with: plaudit merge {first} --out FOLDER"

    sampling = ["--out", tmp_path / "out.jsonl", "--max-prompts", 2, "--max-new-tokens", 4]
    code, _, err = plaudit("sample", first, prompts_file, *sampling)
    assert code == 0, err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2

    scalar = {"kind": "scalar_model", "model": {"path": str(reward_adapter[0])}}
    tree = rl_recipe(first, prompts_file, tmp_path / "rl", scalar, run={"max_steps": 1})
    tree |= {"algorithm": {"kind": "grpo", "kl_coefficient": 0.1}, "reference": {"path": str(first)}}
    recipe = write_recipe(tmp_path / "rl.yaml", tree)
    code, out, err = plaudit("doctor", recipe)
    assert code == 0, out + err
    assert f"a LoRA adapter, merged into its base, {tiny_model}" in "".join(out.split("\n"))
    assert (train_rl(recipe) / "model.safetensors").exists()


def test_an_adapter_of_an_adapter_is_refused(trained, plaudit, tmp_path, rows_file):
    model = {"lora": {"rank": 2, "merge_on_save": False}}
    tree = sft_recipe(trained[0], rows_file, tmp_path / "run")
    tree["model"] |= model
    code, _, err = plaudit("sft", write_recipe(tmp_path / "sft.yaml", tree))
    assert code == 2
    assert "model.lora.merge_on_save is false, but model.path is itself a LoRA adapter" in err
    assert "plaudit merge" in err


@pytest.fixture
def adapter(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "adapter"))


def change(adapter: Path, **settings: object) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_model_name_or_path": "models/gone/away"}, "a LoRA adapter for models/gone/away, which does not exist"),
        ({"base_model_name_or_path": "/models/gone"}, "set base_model_name_or_path in .*adapter_config.json to where it is"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is empty"),
        ({"peft_type": "IA3"}, "an adapter of type IA3, and plaudit reads LoRA only"),
    ],
)
def test_an_unusable_adapter_is_reported(adapter, settings, message):
    change(adapter, **settings)
    with pytest.raises(RecipeError, match=message):
        read_lora_folder(adapter)


def test_damaged_adapters_are_reported(adapter, tmp_path, tiny_model, rows_file):
    (adapter / "adapter_model.safetensors").rename(adapter / "elsewhere")
    with pytest.raises(RecipeError, match=r"this LoRA adapter has no adapter_model\.safetensors"):
        read_lora_folder(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(RecipeError, match="does not fit its base"):
        load_policy(ModelSettings(path=str(adapter)), load_template(load_tokenizer(str(tiny_model)), None), CPU)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(RecipeError, match="is not peft's description of an adapter"):
        read_lora_folder(adapter)


def test_an_adapter_with_other_layers_than_its_base_is_reported(adapter, template):
    change(adapter, layers_to_transform=[0])  # its weights say otherwise
    change(adapter, target_modules=["q_proj"], layers_to_transform=None, r=2)
    with pytest.raises(RecipeError, match="does not fit its base"):
        load_policy(ModelSettings(path=str(adapter)), template, CPU)


def test_the_base_is_found_next_to_the_adapter_too(adapter, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "base")
    change(adapter, base_model_name_or_path="../base")
    found = read_lora_folder(adapter)
    assert isinstance(found, LoraFolder)
    assert Path(found.base).samefile(tmp_path / "base")
    change(adapter, base_model_name_or_path="Qwen/Qwen2.5-7B")
    assert with_weights(str(adapter)) == "Qwen/Qwen2.5-7B"


def test_a_tokenizer_comes_from_the_base_if_the_adapter_has_none(adapter):
    assert with_tokenizer(str(adapter)) == str(adapter)
    (adapter / "tokenizer_config.json").unlink()
    assert with_tokenizer(str(adapter)) == with_weights(str(adapter))
    assert load_tokenizer(str(adapter)).is_fast


def test_fingerprints_and_sizes_include_the_base(adapter, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "base")
    change(adapter, base_model_name_or_path=str(tmp_path / "base"))
    before = weights_fingerprint(adapter), model_fingerprint(adapter)
    assert count_parameters(str(adapter)) == count_parameters(str(tiny_model))
    weights = tmp_path / "base/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    after = weights_fingerprint(adapter), model_fingerprint(adapter)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_merge_refuses_what_is_no_adapter_and_what_exists(plaudit, tiny_model, trained, tmp_path):
    code, _, err = plaudit("merge", tiny_model, "--out", tmp_path / "out")
    assert code == 2
    assert "is not a LoRA adapter: it has no adapter_config.json" in err
    code, _, err = plaudit("merge", trained[0], "--out", tmp_path)
    assert code == 2
    assert "exists already" in err
    with pytest.raises(PlauditError):
        read_config(str(tmp_path))
