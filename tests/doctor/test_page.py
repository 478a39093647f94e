"""`plaudit doctor --html`: what the page is made of. tests/report/test_pages_in_browser.py opens it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from plaudit.doctor.rows import count_lengths
from support.pages import HOSTILE, embedded_data
from support.recipes import pair_recipe, rl_recipe, sft_recipe, write_recipe
from support.rows import arithmetic_rows, write_jsonl

FINDING = re.compile(r"^  ([✓!✗]) (\S+) +(.*)$", re.MULTILINE)


@pytest.fixture
def rl(tmp_path, tiny_model, prompts_file, reward_file) -> Path:
    return write_recipe(tmp_path / "rl.yaml", rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file))


def test_the_page_has_the_findings_of_the_terminal(plaudit, rl, tmp_path):
    for settings, expected in (((), 0), (("data.max_prompt_tokens=1", "data.too_long=error"), 1)):
        code, out, _ = plaudit("doctor", rl, *settings, "--html", tmp_path / "doctor.html")
        without, same, _ = plaudit("doctor", rl, *settings)
        assert code == without == expected
        assert FINDING.findall(out) == FINDING.findall(same)
        page = embedded_data(tmp_path / "doctor.html")
        assert [(one["mark"], one["check"], one["text"]) for one in page["findings"]] == FINDING.findall(out)
        assert page["passed"] is (code == 0)
        assert f"page: {tmp_path / 'doctor.html'}" in out


def test_memory_of_each_phase_adds_up_to_what_the_terminal_says(plaudit, rl, tmp_path):
    _, out, _ = plaudit("doctor", rl, "--gpu-memory", 1, "--html", tmp_path / "doctor.html")
    devices = {device["device"]: device for device in embedded_data(tmp_path / "doctor.html")["memory"]}
    cuda = devices["cuda"]
    assert (cuda["available"], cuda["phases"]) == (1e9, ["sampling", "scoring", "training"])
    for i, total in enumerate(cuda["totals"]):
        assert total == pytest.approx(sum(need["sizes"][i] or 0 for need in cuda["needs"]))
        assert f"{total / 1e9:.1f} GB" in out
    assert cuda["totals"][2] > cuda["totals"][1]
    assert devices["cpu"]["available"] is None  # another machine's


def test_sft_has_its_memory_lengths_and_targets(plaudit, tmp_path, tiny_model, rows_file):
    recipe = write_recipe(tmp_path / "sft.yaml", sft_recipe(tiny_model, rows_file, tmp_path / "run"))
    plaudit("doctor", recipe, "data.max_tokens=999", "--html", tmp_path / "doctor.html")
    page = embedded_data(tmp_path / "doctor.html")
    assert [device["phases"] for device in page["memory"]] == [["training"]]
    [train] = page["lengths"]
    assert sum(train["counts"]) == 60
    assert train["limits"][0] == {"name": "data.max_tokens", "at": 999, "over": 0}
    [row] = page["excerpts"]
    assert row["title"].endswith("target tokens are marked")
    answer = arithmetic_rows()[0]["messages"][-1]["content"]
    assert next(text for text, marked in row["pieces"] if marked).startswith(answer)


def test_pairs_have_their_differences_in_length(plaudit, tmp_path, tiny_model, pairs_file):
    recipe = write_recipe(tmp_path / "dpo.yaml", pair_recipe(tiny_model, pairs_file, tmp_path / "run") | {"stage": "dpo"})
    code, out, err = plaudit("doctor", recipe, "--html", tmp_path / "doctor.html")
    assert code == 0, out + err
    longer, difference = embedded_data(tmp_path / "doctor.html")["lengths"]
    assert sum(longer["counts"]) == sum(difference["counts"]) == 40
    [zero] = difference["limits"]
    assert (zero["name"], zero["at"]) == ("equally long", 0)
    assert difference["low"] <= 0


def test_several_processes_have_a_bar_for_each_sharding(plaudit, rl, tmp_path):
    plaudit("doctor", rl, "cluster.gpus=2", "--gpu-memory", 1, "--html", tmp_path / "doctor.html")
    rows = embedded_data(tmp_path / "doctor.html")["shardings"]
    assert [row["cells"]["sharding"] for row in rows] == ["none", "optimiser", "full"]
    for row in rows:
        least = sum(row["parts"].values())
        assert row["cells"]["at least"] == (f"{least / 1e9:.1f} GB" if least >= 1e8 else f"{least / 1e6:.0f} MB")


def test_a_recipe_of_rules_has_its_page_too(plaudit, tmp_path):
    recipe = write_recipe(tmp_path / "rules.yaml", {"stage": "score", "rewards": [{"kind": "exact"}]})
    assert plaudit("doctor", recipe, "--html", tmp_path / "doctor.html")[0] == 0
    page = embedded_data(tmp_path / "doctor.html")
    assert (page["stage"], page["memory"], page["lengths"]) == ("score", [], [])
    assert page["findings"][0]["check"] == "reward"


def test_rows_cannot_leave_the_data_and_keys_do_not_reach_it(plaudit, tmp_path, tiny_model, monkeypatch):
    monkeypatch.setenv("OTHER_API_KEY", "a-very-secret-value-123")
    rows = arithmetic_rows()
    rows[0]["messages"][0]["content"] = f"{HOSTILE} a-very-secret-value-123 \u202e"
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    recipe = write_recipe(tmp_path / "<script>.yaml", sft_recipe(tiny_model, file, tmp_path / "run"))
    _, out, _ = plaudit("doctor", recipe, "--html", tmp_path / "doctor.html")
    assert "a-very-secret-value-123" not in out
    text = (tmp_path / "doctor.html").read_text()
    assert len(re.findall("<script", text)) == 2  # the data and the program
    assert "a-very-secret-value-123" not in text
    page = embedded_data(tmp_path / "doctor.html")
    assert "<script>.yaml" in page["recipe"]
    assert HOSTILE in "".join(piece for piece, _ in page["excerpts"][0]["pieces"])


def test_a_page_that_cannot_be_written_costs_nothing(plaudit, rl, tmp_path):
    code, out, err = plaudit("doctor", rl, "--html", tmp_path / "nowhere" / "doctor.html")
    assert (code, out) == (2, "")
    assert err.strip() == f"--html: there is no folder {tmp_path / 'nowhere'}; create it, or name a file in one that exists"
    code, out, err = plaudit("doctor", rl, "--html", tmp_path)
    assert (code, out) == (2, "")
    assert "is a folder; name a file in it" in " ".join(err.split())


def test_a_row_cannot_write_to_the_terminal_but_as_text(plaudit, tmp_path, tiny_model):
    rows = arithmetic_rows()
    rows[0]["messages"][0]["content"] = "\x1b[2J \u202e"
    recipe = write_recipe(
        tmp_path / "sft.yaml", sft_recipe(tiny_model, write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "run")
    )
    _, out, _ = plaudit("doctor", recipe)
    assert "\\x1b[2J \\u202e" in out
    assert not {"\x1b", "\u202e"} & set(out)
    assert f"⟦{rows[0]['messages'][-1]['content']}" in out  # the marks are where they were


@pytest.mark.parametrize(
    ("lengths", "limit", "low", "high", "over"),
    [
        ([3, 3, 5, 90], 100, 3, 102, 0),  # the limit is in the picture: 98 values in columns of 3
        ([3, 3, 5, 9], 100, 3, 10, 0),  # too far away
        ([30, 50], 10, 10, 52, 2),  # all are longer
    ],
)
def test_a_histogram_counts_every_length_and_reaches_a_near_limit(lengths, limit, low, high, over):
    found = count_lengths("title", "note", np.array(lengths), {"limit": limit})
    assert (found["low"], found["high"], sum(found["counts"])) == (low, high, len(lengths))
    assert found["limits"] == [{"name": "limit", "at": limit, "over": over}]
    width = (high - low) / len(found["counts"])
    assert found["counts"][int((lengths[0] - low) // width)] >= 1
    json.dumps(found, allow_nan=False)
