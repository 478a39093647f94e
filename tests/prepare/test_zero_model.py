"""`plaudit prepare zero-model`: a base model with a template, an end token and the files that say where responses end."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from plaudit.data.templates import ChatTemplate, load_template, load_tokenizer
from plaudit.errors import DataError
from plaudit.files import fingerprint
from plaudit.prepare.zero_model import make_zero_model
from plaudit.recipe import View
from plaudit.rewards.view import see
from plaudit.types import Conversation

USER, REPLY = {"role": "user", "content": " Hi "}, {"role": "assistant", "content": "<think> a </think>\n<response> b </response>"}


@pytest.fixture
def zero(tmp_path, tiny_model):
    def make(**settings) -> Path:
        make_zero_model(str(tiny_model), tmp_path / "zero", **settings)
        return tmp_path / "zero"

    return make


def template_of(folder: Path) -> ChatTemplate:
    return load_template(load_tokenizer(str(folder)), None)


@pytest.mark.parametrize("thinking", [True, False])
def test_the_template_asks_for_the_form_and_shows_turns(zero, thinking):
    template = template_of(zero(thinking=thinking))
    text = template.render([USER, REPLY, USER], generation_prompt=True)
    description, _, turns = text.partition("\n\n")
    assert turns == f"User: <query>Hi</query>\nAssistant: {REPLY['content']}<|im_end|>\nUser: <query>Hi</query>\nAssistant:"
    assert ("<think>" in description) == thinking
    assert "<response>" in description
    with_system = template.render([{"role": "system", "content": " Be brief. "}, USER])
    assert with_system == template.render([USER]).replace("\n\nUser:", "\n\nBe brief.\n\nUser:")


@pytest.mark.parametrize("role", ["tool", "developer"])
def test_a_role_without_a_form_is_refused(zero, role):
    with pytest.raises(DataError, match=f"none with the role {role}"):
        template_of(zero()).example(Conversation([USER, {"role": role, "content": "4"}, REPLY]), "here")


def test_only_the_assistant_s_turn_and_its_end_are_trained_on(zero):
    template = template_of(zero())
    example = template.example(Conversation([USER, REPLY]), "here")
    trained = template.tokenizer.decode(example.tokens[example.loss_mask])
    assert trained.strip() == f"{REPLY['content']}<|im_end|>"


@pytest.mark.parametrize(("thinking", "marker"), [(True, "<think>"), (False, None)])
def test_the_files_say_where_thoughts_and_responses_end(zero, thinking, marker):
    folder = zero(thinking=thinking)
    assert json.loads((folder / "longcot_config.json").read_text()) == {
        "longcot": True,
        "longcot_delimiter": "<response>",
        "end_delimiter": None,
        "start_think_marker": marker,
    }
    assert (folder / "stop.txt").read_text() == "</response>\n"
    view = View(longcot_config=str(folder / "longcot_config.json"), strict=True)
    assert see(view, REPLY["content"]).text == "b"


def test_weights_are_those_of_the_base(zero, tiny_model):
    folder = zero()
    assert fingerprint(folder / "model.safetensors") == fingerprint(tiny_model / "model.safetensors")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_the_end_token_can_be_chosen_among_the_tokenizer_s_own(tmp_path, plaudit, tiny_model):
    command = ("prepare", "zero-model", tiny_model, "--out", tmp_path / "zero")
    code, out, err = plaudit(*command, "--eos", "<|endoftext|>")
    assert code == 0, err
    assert "with end token <|endoftext|>; the template's shortest prompt has " in out
    config = json.loads((tmp_path / "zero/generation_config.json").read_text())
    tokenizer = load_tokenizer(str(tmp_path / "zero"))
    assert config["eos_token_id"][0] == tokenizer.eos_token_id
    assert len(config["eos_token_id"]) == 2, "the base's own end token still ends a text"
    code, _, err = plaudit(*command, "--eos", "<|eot_id|>")
    assert "is not empty" in err
    code, _, err = plaudit(*command[:-1], tmp_path / "other", "--eos", "<|eot_id|>")
    assert code == 2
    assert "has no token <|eot_id|> (it has <|im_end|>" in err


def test_what_is_no_base_model_is_refused(tmp_path, plaudit, tiny_model):
    for base, message in ((tmp_path / "none", "no such folder"), (tmp_path, "incomplete weights")):
        code, _, err = plaudit("prepare", "zero-model", base, "--out", tmp_path / "zero")
        assert code == 2
        assert message in err
        assert not list((tmp_path / "zero").glob("*")), "nothing is left behind"
