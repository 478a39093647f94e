"""longcot_config.json and stop.txt of a model folder: read, honoured, written by SFT on thoughts, carried from stage to stage."""

import json
import shutil
from pathlib import Path

import pytest

import plaudit as package
from plaudit.errors import PlauditError, RecipeError
from plaudit.recipe import RLRecipe, ScoreRecipe
from plaudit.response_files import LONGCOT, STOP, have_thoughts, read_response_files, stop_strings
from plaudit.rewards.view import see
from plaudit.rollout.native.engine import NativeEngine
from support.recipes import pair_recipe, rl_recipe, sft_recipe, train_dpo, train_reward_model, train_rl, train_sft, write_recipe
from support.rows import arithmetic_rows, prompt_rows, write_jsonl

ZERO = {"longcot": True, "longcot_delimiter": "<response>", "end_delimiter": None, "start_think_marker": None}


@pytest.fixture
def model(tmp_path, tiny_model) -> Path:
    """A tiny model that thinks and ends its responses as a zero model does."""
    folder = tmp_path / "zero"
    shutil.copytree(tiny_model, folder)
    (folder / LONGCOT).write_text(json.dumps(ZERO))
    (folder / STOP).write_text("</response>\n")
    return folder


def written(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name in (LONGCOT, STOP)}


def thinking_rows(share: float = 1.0) -> list[dict]:
    rows = arithmetic_rows()[:20]
    for row in rows[: round(share * len(rows))]:
        answer = row["messages"][-1]
        answer["content"] = f"<think>\nLet me see.\n</think>\n\n{answer['content']}"
    return rows


# Reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "strings"),
    [
        (b"</response>", ("</response>",)),
        (b"\xef\xbb\xbf</a>\r\n\r\n b \n</a>\n", ("</a>", " b ")),  # a byte order mark, Windows' lines, spaces that count
        ("»\n".encode(), ("»",)),
        (b"\n", ()),
    ],
)
def test_stop_strings_are_the_lines(model, content, strings):
    (model / STOP).write_bytes(content)
    assert stop_strings(str(model), None) == strings
    assert stop_strings(str(model), ("x",)) == ("x",)
    assert stop_strings(str(model), ()) == ()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (STOP, b"\xff\xfe", "stop.txt should be text, a stop string on each line: .* Correct or delete it"),
        (STOP, b"a" * 70_000, "it has more than 64 KiB"),
        (LONGCOT, b'{"longcot_delimiter": "<a>"', "longcot_config.json cannot be read: it is not JSON: .* Correct or delete it"),
        (LONGCOT, b"{}", "has no longcot_delimiter: add the text that ends thoughts, or null for none"),
        (LONGCOT, b'{"longcot_delimiter": ["a"]}', "longcot_delimiter should be text or null, not "),
    ],
)
def test_damaged_files_are_reported(model, name, content, message):
    (model / name).write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        read_response_files(str(model))


def test_an_adapter_without_the_files_has_those_of_its_base(model, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model), "peft_type": "LORA"}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    assert read_response_files(str(adapter)) == written(model)
    (adapter / STOP).write_text("own")
    assert read_response_files(str(adapter)) == {**written(model), STOP: b"own"}


def test_most_rows_decide_whether_texts_have_thoughts():
    assert have_thoughts(["a</think>b", "<think>c</think>", "d"])
    assert not have_thoughts(["a</think>b", "<think>c"])
    assert not have_thoughts([])


# view.longcot_config: model ------------------------------------------------------------------------------------------


def rewards(view: dict) -> list[dict]:
    return [
        {"kind": "exact", "name": "a", "view": view},
        {"kind": "cascade", "rule": {"kind": "exact", "view": view}, "judge": {"kind": "exact"}},
    ]


def test_a_view_reads_the_policys_own_file(model, tmp_path, prompts_file):
    tree = rl_recipe(model, prompts_file, tmp_path / "run", {"kind": "exact"})
    recipe = RLRecipe.model_validate({**tree, "rewards": rewards({"longcot_config": "model"})})
    first, cascade = recipe.rewards
    for reward in (first, cascade.rule):  # pyright: ignore
        assert reward.view.longcot_file == model / LONGCOT
        assert see(reward.view, "<think> a </think> <response> b </response>").text == "b"
    assert model / LONGCOT in cascade.files
    # A recipe for another model does not change this one's.
    other = RLRecipe.model_validate({**tree, "model": {"path": str(tmp_path)}, "rewards": recipe.rewards})
    assert other.rewards[0].view.longcot_file == tmp_path / LONGCOT
    assert recipe.rewards[0].view.longcot_file == model / LONGCOT


def test_a_view_of_no_policy_needs_a_file_name():
    recipe = ScoreRecipe.model_validate({"rewards": rewards({"longcot_config": "model"})})
    with pytest.raises(RecipeError, match=r"view.longcot_config: model is the policy's longcot_config.json, .*: name a file"):
        see(recipe.rewards[0].view, "a")


def test_a_policy_without_the_file_is_reported(tmp_path, tiny_model, prompts_file):
    reward = {"kind": "exact", "view": {"longcot_config": "model"}}
    file = write_recipe(tmp_path / "r.yaml", rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward))
    with pytest.raises(PlauditError, match=r"reward 'exact': .*longcot_config.json is not a file. `plaudit sft` on texts with th"):
        train_rl(file)


# From stage to stage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["sft", "dpo", "rl", "adapter"])
def test_every_stage_carries_them_along(model, tmp_path, stage, rows_file, pairs_file, prompts_file, plaudit):
    run = {"max_steps": 1}
    if stage == "dpo":
        train_dpo(write_recipe(tmp_path / "r.yaml", pair_recipe(model, pairs_file, tmp_path / "run", run=run)))
    elif stage == "rl":
        reward = {"kind": "exact", "view": {"longcot_config": "model", "strict": True}}
        train_rl(write_recipe(tmp_path / "r.yaml", rl_recipe(model, prompts_file, tmp_path / "run", reward, run=run)))
    else:
        lora = {"lora": {"rank": 2, "merge_on_save": False}} if stage == "adapter" else {}
        train_sft(write_recipe(tmp_path / "r.yaml", sft_recipe(model, rows_file, tmp_path / "run", model=lora, run=run)))
    for folder in (tmp_path / "run/model", tmp_path / "run/checkpoints/step_000001/model"):
        assert written(folder) == written(model)
        assert len(written(folder)) == 2
    if stage == "adapter":
        code, _, err = plaudit("merge", tmp_path / "run/model", "--out", tmp_path / "merged")
        assert code == 0, err
        assert written(tmp_path / "merged") == written(model)


def test_a_reward_model_has_no_responses(model, tmp_path, pairs_file):
    train_reward_model(write_recipe(tmp_path / "r.yaml", pair_recipe(model, pairs_file, tmp_path / "run", run={"max_steps": 1})))
    assert written(tmp_path / "run/model") == {}


@pytest.mark.parametrize(("share", "thinks"), [(1.0, True), (0.4, False), (0.0, False)])
def test_sft_on_thoughts_says_where_they_end(tiny_model, tmp_path, capsys, share, thinks):
    rows = write_jsonl(tmp_path / "rows.jsonl", thinking_rows(share))
    recipe = sft_recipe(tiny_model, rows, tmp_path / "run", run={"max_steps": 1}, data={"train": str(rows), "max_tokens": 512})
    train_sft(write_recipe(tmp_path / "r.yaml", recipe))
    assert ("most rows have thoughts" in capsys.readouterr().err) == thinks
    files = written(tmp_path / "run/model")
    assert set(files) == ({LONGCOT} if thinks else set())
    if thinks:
        config = {"longcot": True, "longcot_delimiter": "</think>", "end_delimiter": None, "start_think_marker": "<think>"}
        assert json.loads(files[LONGCOT]) == config
        # The next stage finds it.
        tree = rl_recipe(tmp_path / "run/model", rows, tmp_path / "rl", {"kind": "exact", "view": {"longcot_config": "model"}})
        view = RLRecipe.model_validate(tree).rewards[0].view
        assert see(view, "<think>\na\n</think>\n\nb").text == "b"


def test_sft_keeps_a_file_that_the_rows_contradict_and_says_so(model, tmp_path, capsys):
    rows = write_jsonl(tmp_path / "rows.jsonl", thinking_rows())
    recipe = sft_recipe(model, rows, tmp_path / "run", run={"max_steps": 1}, data={"train": str(rows), "max_tokens": 512})
    train_sft(write_recipe(tmp_path / "r.yaml", recipe))
    assert "says that thoughts end with <response>, which no row has: correct it, or delete it" in capsys.readouterr().err
    assert written(tmp_path / "run/model") == written(model)


# Sampling ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stops(monkeypatch) -> list[tuple[str, ...]]:
    """The stop strings that engines are called with."""
    calls: list[tuple[str, ...]] = []
    generate = NativeEngine.generate

    def generate_and_record(self, requests, sampling):
        calls.append(sampling.stop)
        return generate(self, requests, sampling)

    monkeypatch.setattr(NativeEngine, "generate", generate_and_record)
    return calls


@pytest.mark.parametrize(("setting", "expected"), [(None, ("</response>",)), ([], ()), (["e"], ("e",))])
def test_rl_stops_where_the_model_says(model, tmp_path, prompts_file, stops, setting, expected):
    tree = rl_recipe(model, prompts_file, tmp_path / "run", {"kind": "exact"}, data={"val": str(prompts_file)})
    tree["rollout"]["stop"] = setting
    file = write_recipe(tmp_path / "r.yaml", tree)
    train_rl(file, "run.max_steps=1", "run.validate_first=false")
    assert stops == [expected, expected]  # in training and in validation
    (model / STOP).write_text("other")
    if setting is None:
        with pytest.raises(PlauditError, match=r"the model's stop.txt"):
            train_rl(file, "run.max_steps=1", "run.validate_first=false")


def test_samples_end_with_a_string_of_the_file(model, tmp_path, plaudit, stops):
    (model / STOP).write_text("e\n.\n")
    prompts = write_jsonl(tmp_path / "p.jsonl", prompt_rows(3))
    command = ("sample", model, prompts, "--max-new-tokens", 30, "--device", "cpu", "-n", 4)
    code, _, err = plaudit(*command, "--out", tmp_path / "out.jsonl")
    assert code == 0, err
    rows = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    texts = [response["text"] for row in rows for response in row["responses"]]  # the model has a longcot_config.json, too
    assert any(text.endswith(("e", ".")) for text in texts)
    assert all("e" not in text[:-1] and "." not in text[:-1] for text in texts)
    plaudit(*command, "--out", tmp_path / "own.jsonl", "--stop", "x")
    package.sample(str(model), ["Hi"], max_new_tokens=2, device="cpu")
    package.sample(str(model), ["Hi"], max_new_tokens=2, stop=[], device="cpu")
    assert stops == [("e", "."), ("x",), ("e", "."), ()]
