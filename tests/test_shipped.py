"""Shipped files are found by name from any folder, as after `pip install`; copies in the current folder come first."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from plaudit import shipped
from plaudit.config import load
from plaudit.data.rows import read_rows
from plaudit.inputs import load_checked
from plaudit.shipped import DOCS, FOLDER, find_shipped, first_comment, shipped_recipes
from support.paths import REPOSITORY


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """An empty folder: no clone, no recipes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_wheel_contains_the_folder_that_is_searched():
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert FOLDER == REPOSITORY / "recipes"
    assert build["force-include"] == {"recipes": "plaudit/recipes", "docs": "plaudit/docs"}
    assert shipped.PACKAGE / "recipes" == REPOSITORY / "plaudit/recipes"
    assert DOCS == REPOSITORY / "docs"


def test_every_page_that_a_message_names_is_shipped_and_the_help_says_where(plaudit):
    sources = "".join(file.read_text() for file in (REPOSITORY / "plaudit").rglob("*.py"))
    assert [page for page in set(re.findall(r"\bdocs/([\w/]+\.md)", sources)) if not (DOCS / page).is_file()] == []
    code, out, _ = plaudit("--help")
    assert (code, f"{DOCS}\n" in out) == (0, True)


def test_a_recipe_and_the_files_it_names_are_found_from_any_folder():
    loaded = load("recipes/preferences/dpo.yaml")
    assert loaded.path == FOLDER / "preferences/dpo.yaml"
    assert loaded.recipe.data.train == (str(FOLDER / "preferences/train.jsonl"),)  # pyright: ignore
    [reward] = load("recipes/smollm2/grpo.yaml").recipe.rewards  # pyright: ignore
    assert reward.files == [FOLDER / "smollm2/reward.py"]
    override = load("recipes/preferences/dpo.yaml", ["data.train=recipes/first/train.jsonl"])
    assert override.recipe.data.train == (str(FOLDER / "first/train.jsonl"),)  # pyright: ignore


def test_outputs_stay_in_the_current_folder():
    assert load("recipes/first/sft.yaml", ["run.dir=recipes/first"]).recipe.run.dir == "recipes/first"  # pyright: ignore
    assert find_shipped(Path("recipes/first")) == Path("recipes/first")


def test_files_of_the_current_folder_come_first(elsewhere):
    own = elsewhere / "recipes/first/train.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text('{"prompt": "mine", "response": "mine"}\n')
    assert read_rows("recipes/first/train.jsonl")[0]["prompt"] == "mine"
    assert len(read_rows("recipes/first/val.jsonl")) > 1
    assert load("recipes/first/sft.yaml").recipe.data.train == ("recipes/first/train.jsonl",)  # pyright: ignore


@pytest.mark.parametrize("name", ["recipes/first/none.yaml", "recipes/../README.md", "first/sft.yaml", "README.md"])
def test_other_names_are_left_alone(name):
    assert find_shipped(Path(name)) == Path(name)


def test_every_recipe_is_listed_with_a_sentence(plaudit):
    code, out, _ = plaudit("recipes")
    assert code == 0
    assert set(shipped_recipes()) == {str(file.relative_to(REPOSITORY)) for file in (REPOSITORY / "recipes").rglob("*.yaml")}
    for name, file in shipped_recipes().items():
        assert first_comment(file), f"{name}: its first line should say what it does"
        assert f"{name} " in out
    assert "A first recipe" in out


@pytest.mark.parametrize(
    ("recipe", "commands"),
    [
        ("first/rl", ["plaudit prepare tiny-model recipes/first/train.jsonl --out models/tiny"]),
        ("demo/rl", ["plaudit prepare sorting --out runs/demo/data", "plaudit sft recipes/demo/sft.yaml"]),
        ("chain/grpo", ["plaudit sft recipes/chain/sft.yaml", "plaudit reward-model recipes/chain/reward_model.yaml"]),
        (
            "chain/dpo",
            [
                "plaudit rl recipes/chain/grpo.yaml",
                "plaudit prepare pairs runs/chain/grpo/samples/train_*.parquet --out data/chain",
            ],
        ),
        (
            "rlmt/grpo_qwenbase_warm-start_nothink",
            [
                "plaudit sft recipes/rlmt/sft_qwen_think.yaml data.train=data/sft_nothink.parquet "
                "run.dir=runs/rlmt-sft-qwen-nothink",
            ],
        ),
        (
            "smollm2/grpo",
            [
                "plaudit prepare smollm2 --out models/smollm2",
                "plaudit prepare arithmetic --out data/arithmetic --train 4000 --val 500",
            ],
        ),
    ],
)
def test_all_that_is_missing_is_reported_with_the_commands_that_make_it(plaudit, recipe, commands):
    code, _, err = plaudit("doctor", f"recipes/{recipe}.yaml")
    problems, _, how = err.partition("The comment at the top of ")
    assert (code, "model.path: " in problems) == (2, True), err
    assert how.splitlines()[1:] == [f"  {command}" for command in commands]
    if recipe == "smollm2/grpo":
        assert "data.train: data/arithmetic/train.parquet does not exist." in problems


def test_commands_that_make_other_files_are_not_named(plaudit, elsewhere):
    (elsewhere / "models/tiny").mkdir(parents=True)
    code, _, err = plaudit("sft", "recipes/first/sft.yaml", "model.path=models/tinny")
    assert (code, err) == (2, "model.path: models/tinny does not exist. Did you mean models/tiny?\n")


FIRST = ["reward.py", "rl.yaml", "sft.yaml", "train.jsonl", "val.jsonl"]


def test_recipes_are_copied_to_edit(plaudit, elsewhere):
    code, out, _ = plaudit("recipes", "first")
    assert (code, out.split()) == (0, [f"recipes/first/{name}" for name in FIRST])
    assert load("recipes/first/sft.yaml").path == Path("recipes/first/sft.yaml")
    code, _, err = plaudit("recipes", "first")
    assert (code, err) == (2, "recipes/first exists already; rename or remove it to get a fresh copy\n")
    code, _, err = plaudit("recipes", "frist")
    assert code == 2
    assert "Did you mean first?" in err


def test_the_first_recipe_is_checked_without_a_clone(plaudit):
    code, _, err = plaudit("prepare", "tiny-model", "recipes/first/train.jsonl", "--out", "models/tiny", "--hidden-size", "32")
    assert code == 0, err
    loaded, sources = load_checked(Path("recipes/first/sft.yaml"), None, "sft")
    assert [source.path for source in sources["train"]] == [FOLDER / "first/train.jsonl"]
    assert loaded.recipe.stage == "sft"


# Rollouts to try rewards on ------------------------------------------------------------------------------------------

ROLLOUTS = "recipes/arithmetic/rollouts.jsonl"


def test_shipped_rollouts_are_scored(plaudit, elsewhere):
    code, _, err = plaudit("score", "recipes/arithmetic/rewards.yaml", ROLLOUTS, "--out", "scored.jsonl")
    assert code == 0, err
    scored = [json.loads(line) for line in (elsewhere / "scored.jsonl").read_text().splitlines()]
    agree = [bool(r) == label for row in scored for r, label in zip(row["reward"], row["label"], strict=True)]
    assert sum(agree) / len(agree) > 0.98


def test_shipped_rollouts_show_what_an_audit_finds(plaudit, elsewhere):
    """A strict reward passes, one that accepts the right number anywhere fails; reports never go into the installation."""
    code, out, err = plaudit("audit", "recipes/arithmetic/rewards.yaml", ROLLOUTS)
    assert code == 0, out + err
    assert (elsewhere / "runs/audit/rewards/audit.html").exists()  # named after the recipe
    code, out, _ = plaudit("audit", "recipes/audit/any_number.yaml", ROLLOUTS, "--out", "any_number")
    assert code == 1
    checks = json.loads((elsewhere / "any_number/audit.json").read_text())["checks"]
    failed = {check["name"] for check in checks if check["state"] == "fail"}
    assert "exploit: many_guesses" in failed
    assert not (FOLDER / "arithmetic/audit").exists()


def test_shipped_rollouts_are_small_and_their_labels_are_right():
    assert (FOLDER / "arithmetic/rollouts.jsonl").stat().st_size < 200_000
    rows = read_rows(ROLLOUTS)
    plain = 0
    for row in rows:
        question = row["prompt"][-1]["content"].removesuffix(" =")
        left, sign, right = question.split()
        truth = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert row["reward_model"]["ground_truth"] == str(truth)
        for response, label in zip(row["responses"], row["label"], strict=True):
            if response.startswith(f"{question} = ") and response.removeprefix(f"{question} = ").strip().isdecimal():
                plain += 1
                assert label == (int(response.rsplit("= ")[-1]) == truth), response
    assert plain > 0.7 * sum(len(row["responses"]) for row in rows)
