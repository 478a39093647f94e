"""Models from the Hugging Face hub: the disk first, then the hub once, with a message that says both."""

import json
import socket
from pathlib import Path

import pytest
import torch

from plaudit import hub
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.errors import RecipeError
from plaudit.files import weights_fingerprint
from plaudit.lora_folder import CONFIG, is_lora_folder, read_lora_folder
from plaudit.models.folder import read_config
from plaudit.models.trainable import load_policy
from plaudit.recipe import LoraSettings, ModelSettings
from support.hub import forget, serve_hub, use_hub
from support.rows import arithmetic_rows, write_jsonl


@pytest.fixture
def local_hub(tmp_path, monkeypatch, tiny_model):
    """A hub with one model, org/tiny, and an empty cache."""
    with serve_hub(tmp_path / "hub") as served:
        use_hub(monkeypatch, served.url, tmp_path / "cache")
        served.add("models", "org/tiny", {file.name: file.read_bytes() for file in tiny_model.iterdir()})
        yield served


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    """Connections are refused."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        use_hub(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}", tmp_path / "cache")
        yield


@pytest.mark.parametrize("name", ["./org/tiny", "/org/tiny", "~/tiny", "tiny", "a/b/c", "org/rows.jsonl", "org/chat.jinja"])
def test_a_path_is_never_looked_up(local_hub, name):
    with pytest.raises(RecipeError, match="no such folder"):
        hub.model_folder(name)
    assert local_hub.requests == []


def test_a_folder_wins_over_the_hub_and_a_name_in_an_existing_folder_is_a_path(local_hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org/tiny").mkdir(parents=True)
    assert hub.model_folder("org/tiny") == Path("org/tiny")
    with pytest.raises(RecipeError, match=r"org/tny: no such folder\. Did you mean org/tiny\?"):
        hub.model_folder("org/tny")
    assert local_hub.requests == []


def test_config_and_tokenizer_come_without_the_weights(local_hub, tiny_model):
    assert read_config("org/tiny").to_dict()["hidden_size"] == read_config(str(tiny_model)).to_dict()["hidden_size"]
    assert len(load_tokenizer("org/tiny")) == len(load_tokenizer(str(tiny_model)))
    assert not any("safetensors" in request for request in local_hub.requests)
    assert weights_fingerprint(hub.model_folder("org/tiny")) == weights_fingerprint(tiny_model)


def test_a_model_the_hub_does_not_have(local_hub):
    for _ in range(2):
        with pytest.raises(RecipeError, match="there is no folder org/none here, and the Hugging Face hub has no such model"):
            read_config("org/none")
    assert len([request for request in local_hub.requests if "none" in request]) == 1


def test_a_hub_that_cannot_be_reached(no_network):
    for load in (read_config, load_tokenizer, hub.model_folder):
        with pytest.raises(RecipeError, match="there is no folder org/tiny here, and the Hugging Face hub could not be reached"):
            load("org/tiny")


def test_a_hub_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "LIMIT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_hub(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        with pytest.raises(RecipeError, match=r"there is no folder org/tiny here, and the Hugging Face hub (did not|could not)"):
            hub.model_folder("org/tiny")


def test_offline_mode_is_named(no_network, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match="is switched off by HF_HUB_OFFLINE"):
        hub.model_folder("org/tiny")


def test_a_problem_is_forgotten_after_a_minute(local_hub, monkeypatch):
    """A notebook's user sets HF_TOKEN, or joins a network, and runs the cell again."""
    monkeypatch.setattr(hub, "_query", lambda *_: "it is gated")
    with pytest.raises(RecipeError, match="it is gated"):
        hub.model_folder("org/tiny")
    monkeypatch.undo()
    with pytest.raises(RecipeError, match="it is gated"):
        hub.model_folder("org/tiny")
    monkeypatch.setattr(hub, "KEPT_S", 0.0)
    monkeypatch.setattr(hub, "_query", lambda *_: None)
    assert hub.find_problem("org/tiny", "model") is None


def test_a_model_in_the_cache_needs_no_hub(local_hub, monkeypatch, tmp_path):
    folder = hub.model_folder("org/tiny")
    forget(hub._download)
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path / "cache")
    assert hub.model_folder("org/tiny") == folder
    assert read_config("org/tiny")


def test_commands_name_the_setting(plaudit, no_network, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", arithmetic_rows(4))
    recipe = tmp_path / "r.yaml"
    settings = {"stage": "sft", "model": {"path": "org/tiny"}, "data": {"train": str(rows)}, "run": {"dir": "x"}}
    recipe.write_text(json.dumps(settings))
    both = "there is no folder org/tiny here, and the Hugging Face hub could not be reached"
    for verb in ("sft", "doctor"):
        code, _, err = plaudit(verb, recipe)
        assert (code, err.startswith(f"model.path: {both}")) == (2, True), err
    _, _, err = plaudit("sft", recipe, "model.path=models/gone/tiny")
    assert "model.path: models/gone/tiny does not exist." in err
    code, _, err = plaudit("ask", "models/gone/tiny", "Hello?")
    assert (code, err.startswith("MODEL: models/gone/tiny does not exist.")) == (2, True), err
    code, _, err = plaudit("sample", "org/tiny", rows, "--out", tmp_path / "out.jsonl")
    assert (code, both in err) == (2, True), err


# Adapters ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(local_hub, tiny_model, tmp_path) -> Path:
    """An adapter for org/tiny: here, and on the hub as org/adapter."""
    lora = LoraSettings(rank=2, merge_on_save=False)
    template = load_template(load_tokenizer(str(tiny_model)), None)
    policy = load_policy(ModelSettings(path=str(tiny_model), lora=lora), template, torch.device("cpu"))
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.02)
    policy.save(tmp_path / "adapter")
    config = tmp_path / "adapter" / CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "org/tiny"}))
    files = {file.name: file.read_bytes() for file in (tmp_path / "adapter").iterdir() if file.is_file()}
    local_hub.add("models", "org/adapter", files)
    return tmp_path / "adapter"


def test_an_adapter_on_the_hub_is_used_as_its_folder_would_be(plaudit, local_hub, adapter, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", arithmetic_rows(4))
    settings = {"stage": "sft", "model": {"path": "org/adapter"}, "data": {"train": str(rows)}, "run": {"dir": "x"}}
    (tmp_path / "r.yaml").write_text(json.dumps(settings))
    code, out, _ = plaudit("doctor", tmp_path / "r.yaml")
    assert (code, "org/adapter: a LoRA adapter, merged into its base, org/tiny" in " ".join(out.split())) == (0, True), out
    merged = [tmp_path / "from_hub", tmp_path / "from_folder"]
    for name, out in zip(("org/adapter", adapter), merged, strict=True):
        assert plaudit("merge", name, "--out", out)[0] == 0
    assert weights_fingerprint(merged[0]) == weights_fingerprint(merged[1]) != weights_fingerprint(hub.model_folder("org/tiny"))
    assert weights_fingerprint(hub.model_folder("org/adapter")) == weights_fingerprint(adapter)
    looked_up = [request for request in local_hub.requests if request.startswith("GET /api/models/org/adapter")]
    assert len([request for request in looked_up if "revision" not in request and "tree" not in request]) == 1


def test_an_adapter_in_the_cache_needs_no_hub(local_hub, adapter, monkeypatch, tmp_path):
    for name in ("org/adapter", "org/tiny"):
        hub.model_folder(name)
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path / "cache")
    lora = read_lora_folder("org/adapter")
    assert lora is not None
    assert lora.base == "org/tiny"
    assert is_lora_folder("org/adapter")
    assert read_config("org/adapter")


def test_an_adapter_whose_base_was_on_another_disk(local_hub, adapter):
    config = local_hub.root / "models/org/adapter" / CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "/elsewhere/base"}))
    with pytest.raises(RecipeError, match=r"org/adapter: .* for /elsewhere/base, .*\(hf download org/adapter --local-dir"):
        read_lora_folder("org/adapter")
