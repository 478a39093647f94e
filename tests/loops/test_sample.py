"""`plaudit sample`: one line per prompt; it resumes when restarted, and never mixes samples of different settings."""

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plaudit.data.conversations import Source, read_prompts
from plaudit.loops import sample as loop
from support.processes import Command
from support.rows import prompt_rows, write_jsonl

COLUMNS = ["id", "data_source", "prompt", "reward_model", "extra_info", "responses", "status", "tokens", "logprob"]


@pytest.fixture
def sample(tmp_path, plaudit, tiny_model, prompts_file):
    """Runs `plaudit sample` on the tiny model: a few tokens each, into out.jsonl."""

    def run(*options: object, prompts: Path = prompts_file, out: str = "out.jsonl", tokens: int = 10) -> tuple[int, str, str]:
        command = [tiny_model, prompts, "--out", tmp_path / out, "--max-new-tokens", tokens, "--device", "cpu", *options]
        return plaudit("sample", *command)

    return run


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_id(path: Path) -> dict[str, dict]:
    rows = rows_of(path)
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows), "one line per prompt"
    return found


def assert_same_rows(path: Path, expected: dict[str, dict]) -> None:
    """Log-probs may differ in the last bits: the batches held other prompts."""
    rows = by_id(path)
    assert rows.keys() == expected.keys()
    for id, row in rows.items():
        assert {**row, "logprob": None} == {**expected[id], "logprob": None}
        assert row["logprob"] == pytest.approx(expected[id]["logprob"], abs=1e-3)


# Output --------------------------------------------------------------------------------------------------------------


def test_output_rows_have_every_column_that_later_stages_read(tmp_path, sample, prompts_file):
    code, out, err = sample("-n", 3)
    assert code == 0, err
    assert out == f"{tmp_path / 'out.jsonl'}: 12 prompts with 3 responses each\n"
    assert "12 of 12 prompts, longest " in err
    rows = by_id(tmp_path / "out.jsonl")
    assert set(rows) == {f"{prompts_file.name}:{i + 1}" for i in range(12)}
    for i, prompt in enumerate(prompt_rows()):
        row = rows[f"{prompts_file.name}:{i + 1}"]
        assert list(row) == COLUMNS
        assert {name: row[name] for name in prompt} == prompt
        assert [len(row[name]) for name in ("responses", "status", "tokens", "logprob")] == [3, 3, 3, 3]
        assert len(set(row["responses"])) > 1
        assert all(0 < tokens <= 10 for tokens in row["tokens"])
        assert all((tokens == 10) or status == "finished" for tokens, status in zip(row["tokens"], row["status"], strict=True))
        assert all(logprob < 0 for logprob in row["logprob"])
    # Output rows are valid prompts: they can be sampled again, or scored.
    assert len(list(read_prompts(Source(tmp_path / "out.jsonl")))) == 12


def test_defaults_are_one_sample_at_temperature_1(tmp_path, sample, prompts_file):
    assert sample()[0] == 0
    assert sample("--temperature", 1, "--seed", 0, "-n", 1, out="same.jsonl")[0] == 0
    assert by_id(tmp_path / "out.jsonl") == by_id(tmp_path / "same.jsonl")
    (tmp_path / "moved").mkdir()
    elsewhere = write_jsonl(tmp_path / "moved" / prompts_file.name, prompt_rows())
    assert sample(prompts=elsewhere, out="moved.jsonl")[0] == 0
    assert by_id(tmp_path / "out.jsonl") == by_id(tmp_path / "moved.jsonl"), "the same data in another folder"
    assert sample("--seed", 1, out="other.jsonl")[0] == 0
    assert by_id(tmp_path / "out.jsonl") != by_id(tmp_path / "other.jsonl")


def test_greedy_output_matches_generate(tmp_path, sample, tiny_model, prompts_file):
    assert sample("--temperature", 0, "-n", 2)[0] == 0
    rows = by_id(tmp_path / "out.jsonl")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model).eval(), AutoTokenizer.from_pretrained(tiny_model)
    for i in (0, 1, 7):
        row = rows[f"{prompts_file.name}:{i + 1}"]
        chat = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            written = model.generate(**chat, max_new_tokens=10, do_sample=False)
            logprobs = model(written).logits[0].log_softmax(-1)
        start = chat["input_ids"].shape[1]
        assert row["responses"] == [tokenizer.decode(written[0, start:], skip_special_tokens=True)] * 2
        assert row["tokens"] == [written.shape[1] - start] * 2
        by_hand = sum(logprobs[t - 1, written[0, t]].item() for t in range(start, written.shape[1]))
        assert row["logprob"] == pytest.approx([by_hand] * 2, abs=2e-3)


def test_stop_strings_and_filters_reach_the_engine(tmp_path, sample):
    assert sample("--stop", "e", "--stop", ".", "-n", 4, tokens=40)[0] == 0
    rows = rows_of(tmp_path / "out.jsonl")
    finished = [text for row in rows for text, status in zip(row["responses"], row["status"], strict=True) if status == "finished"]
    assert len(finished) > 10
    assert all(text.endswith(("e", ".")) or not {"e", "."} & set(text) for text in finished)
    assert sample("--top-k", 1, out="k.jsonl")[0] == 0
    assert sample("--temperature", 0, out="greedy.jsonl")[0] == 0
    assert [row["responses"] for row in rows_of(tmp_path / "k.jsonl")] == [
        row["responses"] for row in rows_of(tmp_path / "greedy.jsonl")
    ]


def test_max_prompts_takes_the_first_ones(tmp_path, sample, prompts_file):
    """A later run with fewer prompts finds them all in the file."""
    assert sample("--max-prompts", 5)[1] == f"{tmp_path / 'out.jsonl'}: 5 prompts with 1 responses each\n"
    assert set(by_id(tmp_path / "out.jsonl")) == {f"{prompts_file.name}:{i + 1}" for i in range(5)}
    assert "out.jsonl: has 3 of 3 prompts\n" in sample("--max-prompts", 3)[2]
    assert len(by_id(tmp_path / "out.jsonl")) == 5


def test_a_file_named_twice_is_sampled_twice(tmp_path, plaudit, tiny_model, prompts_file):
    out = tmp_path / "out.jsonl"
    code, _, err = plaudit("sample", tiny_model, prompts_file, prompts_file, "--out", out, "--max-new-tokens", 4, "--device", "cpu")
    assert code == 0, err
    rows = by_id(out)
    assert len(rows) == 24


# Resuming ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def uninterrupted(tmp_path, sample) -> dict[str, dict]:
    """The rows that an uninterrupted run writes."""
    assert sample("-n", 2, out="uninterrupted.jsonl")[0] == 0
    return by_id(tmp_path / "uninterrupted.jsonl")


@pytest.mark.grid(2)
@pytest.mark.parametrize("cut", ["mid-line", "after a line", "in the first line", "all of it"])
def test_a_truncated_file_is_completed(tmp_path, sample, uninterrupted, cut):
    out = tmp_path / "out.jsonl"
    assert sample("-n", 2)[0] == 0
    lines = out.read_bytes().splitlines(keepends=True)
    kept = {"mid-line": b"".join(lines[:5]) + lines[5][:40], "after a line": b"".join(lines[:5])}.get(cut, lines[0][:40])
    out.write_bytes(b"" if cut == "all of it" else kept)
    code, _, err = sample("-n", 2)
    assert code == 0
    assert_same_rows(out, uninterrupted)
    assert (f"{out}: has 5 of 12 prompts; resuming with the rest" in err) == (cut in ("mid-line", "after a line"))
    before = out.read_bytes()
    code, text, err = sample("-n", 2)
    assert code == 0
    assert text == f"{out}: 12 prompts with 2 responses each\n"
    assert f"{out}: has 12 of 12 prompts\n" in err
    assert out.read_bytes() == before, "nothing was left to do"


def test_more_prompts_may_be_added_to_the_same_file(tmp_path, sample, uninterrupted):
    """The number of concurrent sequences does not change the samples."""
    assert sample("-n", 2, "--max-prompts", 4)[0] == 0
    code, _, err = sample("-n", 2, "--max-sequences", 3)
    assert code == 0, err
    assert_same_rows(tmp_path / "out.jsonl", uninterrupted)


HALTS = """
import sys, time
from pathlib import Path
from plaudit.cli import main
from plaudit.loops import sample

row, written = sample.group_row, []
marker = Path(sys.argv.pop(1))

def row_or_halt(group, *how):
    if len(written) == 4:
        marker.touch()
        time.sleep(50)
    written.append(group)
    return row(group, *how)

sample.group_row = row_or_halt
main()
"""


def test_kill_9_and_resume(tmp_path, sample, uninterrupted, tiny_model, prompts_file):
    out, marker = tmp_path / "out.jsonl", tmp_path / "reached"
    options = ["--out", out, "--max-new-tokens", 10, "--device", "cpu", "-n", 2]
    process = Command(marker, "sample", tiny_model, prompts_file, *options, script=HALTS)
    process.wait_for(marker.exists)
    process.kill()
    assert len(by_id(out)) == 4, "a prompt is on disk as soon as its last response is done"
    code, _, err = sample("-n", 2)
    assert code == 0
    assert "has 4 of 12 prompts; resuming with the rest" in err
    assert_same_rows(out, uninterrupted)


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        (["-n", 3], "  n: 2 there, 3 now"),
        (["-n", 2, "--temperature", 0.5], "  temperature: 1.0 there, 0.5 now"),
        (["-n", 2, "--seed", 7], "  seed: 0 there, 7 now"),
        (["-n", 2, "--stop", "x"], '  stop: [] there, ["x"] now'),
    ],
)
def test_changed_settings_are_refused(tmp_path, sample, options, differs):
    assert sample("-n", 2, "--max-prompts", 3)[0] == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    code, out, err = sample(*options)
    assert code == 2
    assert not out
    assert err.splitlines()[-2:] == [
        f"--out: {tmp_path / 'out.jsonl'} was made with other settings; choose another file, or use the same ones:",
        differs,
    ]
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert sample("-n", 2, "--max-prompts", 3)[0] == 0


def test_changed_prompts_or_another_model_are_refused(tmp_path, plaudit, tiny_models, sample):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", prompt_rows(3))
    assert sample(prompts=prompts)[0] == 0
    write_jsonl(prompts, prompt_rows(4))
    code, _, err = sample(prompts=prompts)
    assert code == 2
    assert f"  prompts.{prompts}: " in err
    write_jsonl(prompts, prompt_rows(3))
    rest = [prompts, "--out", tmp_path / "out.jsonl", "--max-new-tokens", 10, "--device", "cpu"]
    code, _, err = plaudit("sample", tiny_models["qwen2"], *rest)
    assert code == 2
    assert "  model.path: " in err
    assert "  weights: " in err


@pytest.mark.parametrize("sampled_before", [False, True])
def test_a_file_not_written_by_sample_is_left_alone(tmp_path, sample, sampled_before):
    out = tmp_path / "out.jsonl"
    if sampled_before:
        assert sample()[0] == 0
    out.write_text('{"mine": 1}\n')
    code, _, err = sample()
    assert code == 2
    wrong = "has lines that plaudit sample did not write" if sampled_before else "exists and was not written by plaudit sample"
    assert err.splitlines()[-1] == f"--out: {out} {wrong}; choose another file"
    assert out.read_text() == '{"mine": 1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{path}: the file is empty"),
        ('{"text": "1 + 1?"}\n', "{path}: column 'prompt' is missing (found: text). Rows to sample from have `prompt`"),
        ('{"prompt": []}\n', "{path}: row 1"),
        ('{"prompt": [{"role": "user", "content": "hi"}]}\n{"prom', "{path}:2: not valid JSON"),
    ],
)
def test_unreadable_prompts_give_a_one_line_error(tmp_path, sample, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    code, out, err = sample(prompts=path)
    assert code == 2
    assert not out
    assert err.splitlines()[-1].startswith(message.format(path=path))
    assert "Traceback" not in err
    assert not (tmp_path / "out.jsonl").exists()


def test_missing_files_give_a_one_line_error(tmp_path, plaudit, tiny_model, prompts_file):
    out = tmp_path / "out.jsonl"
    code, _, err = plaudit("sample", tiny_model, tmp_path / "none.jsonl", "--out", out)
    assert code == 2
    assert err == f"PROMPTS: {tmp_path / 'none.jsonl'} does not exist.\n"
    code, _, err = plaudit("sample", tmp_path / "model", prompts_file, "--out", out)
    assert code == 2
    assert err.startswith(f"MODEL: {tmp_path / 'model'} does not exist.")
    (tmp_path / "file").touch()
    code, _, err = plaudit("sample", tiny_model, prompts_file, "--out", tmp_path / "file/out.jsonl", "--device", "cpu")
    assert code == 2
    assert err.splitlines()[-1].startswith(f"--out: {tmp_path / 'file/out.jsonl'} cannot be written: ")


@pytest.mark.parametrize("too_long", ["filter", "error", "cut_left"])
def test_prompts_that_are_too_long(tmp_path, sample, too_long):
    long = {"prompt": [{"role": "user", "content": "What is 1 + 2? " * 40}]}
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [*prompt_rows(2), long])
    code, out, err = sample("--max-prompt-tokens", 50, "--too-long", too_long, prompts=prompts)
    if too_long == "error":
        assert code == 2
        assert f"{prompts.name}:3: " in err.splitlines()[-1]
        assert "tokens, more than " in err.splitlines()[-1]
    else:
        assert code == 0
        kept = 2 if too_long == "filter" else 3
        assert f"{kept} of 3 prompts, longest " in err
        assert out == f"{tmp_path / 'out.jsonl'}: {kept} prompts with 1 responses each\n"


def test_exceeding_the_context_gives_a_one_line_error(tmp_path, sample):
    code, _, err = sample(tokens=4000)
    assert code == 2
    assert "ones exceed the model's context of 2,048. Lower max_new_tokens, or leave out longer prompts." in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_number_out_of_range_is_reported(sample):
    code, _, err = sample("--temperature", -1)
    assert code == 2
    assert "--temperature" in err


def test_ctrl_c_keeps_finished_prompts(tmp_path, sample, uninterrupted, monkeypatch):
    row, written = loop.group_row, []

    def interrupted(group, *how):
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        written.append(group)
        return row(group, *how)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "group_row", interrupted)
        code, _, err = sample("-n", 2)
    assert code == 130
    assert "Traceback" not in err
    assert len(by_id(tmp_path / "out.jsonl")) >= 3
    assert sample("-n", 2)[0] == 0
    assert_same_rows(tmp_path / "out.jsonl", uninterrupted)


def test_an_output_in_use_by_another_process_is_left_alone(tmp_path, sample):
    """Including its half-written line, which looks like a truncated one."""
    assert sample("--max-prompts", 2)[0] == 0
    out = tmp_path / "out.jsonl"
    with out.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write('{"id": "half')
        other.flush()
        before = out.read_bytes()
        code, _, err = sample()
        assert code == 2
        assert err.splitlines()[-1] == f"--out: another process is writing to {out}; wait for it, or choose another file"
        assert out.read_bytes() == before
