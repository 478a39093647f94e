"""RewardBench's own code scores generated data as `plaudit eval rewards` does."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from plaudit.evaluation.results import Evaluation
from plaudit.evaluation.rewardbench import SECTIONS
from support.evaluation import evaluate_rows, of_length, pairs, values
from support.paths import REPOSITORY

PACKAGE = REPOSITORY / ".venv-rewardbench"
pytestmark = pytest.mark.slow


def score_by_package(**given: Any) -> dict[str, Any]:
    if not (PACKAGE / "rewardbench/utils.py").exists():
        pytest.skip("RewardBench's package is missing: make .venv-rewardbench/installed")
    command = [sys.executable, Path(__file__).with_name("side_rewardbench.py"), PACKAGE]
    cases = {"metrics": [], "best_of_four": [], "ties": []} | given
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def draw(request) -> random.Random:
    return random.Random(request.node.name)


def evaluate_case(tmp_path: Path, number: int, rows: list[dict]) -> Evaluation:
    (tmp_path / str(number)).mkdir()
    return evaluate_rows(tmp_path / str(number), rows)


def test_sections_of_version_1(tmp_path, draw):
    """All subsets; some of them; a single section."""
    everything = [subset for sizes in SECTIONS.values() for subset in sizes]
    cases = [everything, draw.sample(everything, 9), list(SECTIONS["Reasoning"])]
    found, metrics = [], []
    for number, subsets in enumerate(cases):
        rows: list[dict] = []
        right: Counter[str] = Counter()
        for subset in [subset for subset in subsets for _ in range(draw.randint(1, 6))]:
            lengths = draw.sample(range(1, 40), 2)
            right[subset] += lengths[0] > lengths[1]
            rows += pairs(tuple(lengths), subset=subset)  # pyright: ignore[reportArgumentType]
        draw.shuffle(rows)
        sizes = Counter(row["subset"] for row in rows)
        metrics.append({subset: right[subset] / size for subset, size in sizes.items()})
        found.append(evaluate_case(tmp_path, number, [row | {"id": i, "prompt": f"{i}"} for i, row in enumerate(rows)]))
    theirs = score_by_package(metrics=metrics)
    assert sorted(theirs["subsets"]) == sorted(everything)
    for ours, sections, subsets in zip(found, theirs["sections"], cases, strict=True):
        present = {section: score for section, score in sections.items() if set(SECTIONS[section]) & set(subsets)}
        assert {section: values(ours, f"RewardBench/{section}")["accuracy"] for section in present} == pytest.approx(present)
        assert values(ours, "RewardBench")["accuracy"] == pytest.approx(sum(present.values()) / len(present))


def test_best_of_four_of_version_2(tmp_path, draw):
    """Few different scores: often several are the highest."""
    subsets = ("Factuality", "Precise IF", "Math", "Safety", "Focus")
    rows, items = [], []
    for i in range(100):
        lengths = [draw.randint(1, 3) for _ in range(4)]
        chosen, *rejected = of_length(*lengths)
        rows.append(
            {"id": str(i), "prompt": f"{i}", "chosen": [chosen], "rejected": rejected, "num_correct": 1, "subset": subsets[i % 5]}
        )
        items.append({"id": i, "scores": [length / 1000 for length in lengths]})
    [credits] = score_by_package(best_of_four=[items])["best_of_four"]
    assert {0.25, 0.5, 1.0, 0.0} <= set(credits)
    ours = evaluate_case(tmp_path, 0, rows)
    theirs = {subset: sum(credits[s::5]) / 20 for s, subset in enumerate(subsets)}
    assert {subset: values(ours, f"RewardBench 2/{subset}")["accuracy"] for subset in subsets} == pytest.approx(theirs)
    assert values(ours, "RewardBench 2")["accuracy"] == pytest.approx(sum(theirs.values()) / 5)


def test_ties_of_version_2(tmp_path, draw):
    """Right answers with equal scores, wrong ones that win or draw level, prompts without `ref` or `tied`, one right answer."""
    cases = []
    for case in range(12):
        items = []
        for n in range(draw.randint(1, 12)):
            high = draw.choice([6, 12, 40])  # few scores: many are equal
            kinds = draw.choice([["ref", "tied"]] * 6 + [["ref"], ["tied"]]) if case % 2 else ["ref", "tied"]
            for kind in kinds:
                right = 1 if kind == "ref" else draw.choice([1, 2, 2, 3, 5])
                equal = draw.random() < 0.2
                above = draw.choice([0, 0, 4, high])  # how much better than wrong answers the right ones tend to be
                correct = [above + draw.randint(1, 1 if equal else high) for _ in range(right)]
                wrong = [draw.randint(1, high) for _ in range(draw.randint(1, 4))]
                items.append({"id": f"{kind}:{n}", "num_correct": right, "lengths": [*correct, *wrong]})
        draw.shuffle(items)
        cases.append(items)
    given = [[item | {"scores": [length / 1000 for length in item["lengths"]]} for item in items] for items in cases]
    theirs = score_by_package(ties=given)["ties"]
    assert len({round(score, 6) for score in theirs}) > 6  # the cases differ
    for number, (items, score) in enumerate(zip(cases, theirs, strict=True)):
        rows = [
            {"id": item["id"], "prompt": item["id"], "subset": "Ties", "num_correct": item["num_correct"],
             "chosen": (texts := of_length(*item["lengths"]))[: item["num_correct"]], "rejected": texts[item["num_correct"] :]}
            for item in items
        ]  # fmt: skip
        ours = values(evaluate_case(tmp_path, number, rows), "RewardBench 2")["accuracy"]
        assert ours == pytest.approx(score, abs=1e-9), f"case {number}: {items}"
