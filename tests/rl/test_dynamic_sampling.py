"""Dynamic sampling: groups without a signal are replaced by others, reproducibly and in a bounded number of rounds."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from plaudit.data.order import RowOrder, RowStream
from plaudit.data.rows import read_rows
from plaudit.errors import PlauditError, RecipeError, StopRequested, TrainingStopped
from plaudit.rl.learner import Learner
from plaudit.rollout.native.engine import NativeEngine
from support.recipes import Stopped, rl_recipe, stop_before, train_rl, write_recipe
from support.rows import prompt_rows, write_jsonl

# The response's length if the ground truth is odd, and 1 otherwise: about half of the prompts have no signal.
SIGNAL_IF_ODD = """
def compute_score(solution_str, ground_truth):
    return float(len(solution_str)) if int(ground_truth) % 2 else 1.0
"""
NO_SIGNAL = """
def compute_score(solution_str):
    return 1.0
"""


@pytest.fixture(scope="module", autouse=True)
def prompts_file(tmp_path_factory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("prompts"))
        yield write_jsonl(Path("prompts.jsonl"), prompt_rows(24))


@pytest.fixture
def recipe(tmp_path, tiny_model, prompts_file):
    def write(name: str = "run", function: str = SIGNAL_IF_ODD, rounds: int = 8, kind: str = "grpo", **sections) -> Path:
        (tmp_path / "reward.py").write_text(function)
        settings = {"train": {"prompts_per_step": 4, "tokens_per_micro_batch": 512}} | sections
        algorithm = {"kind": kind, "dynamic_sampling": {"max_rounds": rounds}}
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / name, tmp_path / "reward.py", algorithm=algorithm, **settings)
        return write_recipe(tmp_path / f"{name}.yaml", tree)

    return write


@pytest.fixture
def trained_on(monkeypatch) -> list[list[str]]:
    """The prompts that each step was trained on."""
    steps: list[list[str]] = []
    learn = Learner.learn

    def record(self, groups, step):
        steps.append([group.group.prompt.id for group in groups])
        return learn(self, groups, step)

    monkeypatch.setattr(Learner, "learn", record)
    return steps


def metrics_of(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def sampled(run: Path, step: int) -> dict[str, set[float]]:
    """The rewards of each prompt, in the order they were sampled."""
    found: dict[str, set[float]] = {}
    for row in read_rows(run / f"samples/train_{step:06d}.parquet"):
        found.setdefault(row["prompt_id"], set()).add(row["reward"])
    return found


def row_of(prompt_id: str) -> int:
    return int(re.findall(r"\d+", prompt_id.partition("#")[0])[-1])


def test_steps_are_filled_with_signal_groups_in_prompt_order(tmp_path, recipe, trained_on):
    train_rl(recipe(run={"max_steps": 3}))
    run, ids = tmp_path / "run", []
    for step, row in enumerate(metrics_of(run), 1):
        groups = sampled(run, step)
        with_signal = [prompt for prompt, rewards in groups.items() if len(rewards) > 1]
        assert trained_on[step - 1] == with_signal[:4]
        assert len(trained_on[step - 1]) == 4
        assert row["groups"] == len(groups) > 4
        assert row["rounds"] > 1
        assert row["groups_missing"] == 0
        assert row["groups_without_signal"] == pytest.approx(1 - len(with_signal) / len(groups))
        ids += groups
        assert row["epoch"] == pytest.approx(len(ids) / 24)
    # No prompt is repeated before all have been sampled.
    rows = [row_of(prompt) for prompt in ids]
    assert len(set(rows[:24])) == min(24, len(rows))


def test_without_any_signal_a_step_ends_after_max_rounds(tmp_path, recipe, trained_on, capsys):
    train_rl(recipe(function=NO_SIGNAL, rounds=3))
    rows = metrics_of(tmp_path / "run")
    assert [(row["rounds"], row["groups"], row["groups_missing"]) for row in rows] == [(3, 12, 4), (3, 12, 4)]
    assert trained_on == [[], []]
    output = capsys.readouterr().err
    assert "all samples of each group have equal rewards" in " ".join(output.split())


def test_a_step_short_of_groups_continues_and_reports_it(tmp_path, recipe, trained_on, capsys):
    train_rl(recipe(rounds=1, run={"max_steps": 1}))
    [row] = metrics_of(tmp_path / "run")
    assert row["rounds"] == 1
    assert 0 < len(trained_on[0]) < 4
    assert row["groups_missing"] == 4 - len(trained_on[0])
    assert f"max_rounds, {row['groups_missing']:.0f} groups with a signal are missing" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_it_resumes_exactly(tmp_path, recipe, monkeypatch):
    settings = {"run": {"max_steps": 4, "save_every": 1}}
    train_rl(recipe("reference", **settings))
    file = recipe("stopped", **settings)
    stop_before(monkeypatch, 3)
    with pytest.raises(Stopped):
        train_rl(file)
    train_rl(file)
    reference, stopped = tmp_path / "reference", tmp_path / "stopped"
    assert metrics_of(stopped) == metrics_of(reference)
    for name in ("model/model.safetensors", "checkpoints/step_000004/state.json"):
        assert (stopped / name).read_bytes() == (reference / name).read_bytes()
    taken = json.loads((reference / "checkpoints/step_000004/state.json").read_text())["prompts"]["taken"]
    assert taken == sum(row["groups"] for row in metrics_of(reference)) > 16


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TrainingStopped("the judge is gone"), "step 2: the judge is gone"),
        (StopRequested(), "stopped during step 2; step 1 is saved"),
    ],
    ids=["a reward fails", "Ctrl-C"],
)
def test_a_stop_in_a_later_round_discards_the_earlier_rounds(tmp_path, recipe, monkeypatch, error, message):
    """Running means have seen the first round by then; the saved checkpoint must not include it."""

    def write(name: str) -> Path:
        file = recipe(name, run={"max_steps": 3})
        tree = json.loads(file.read_text())
        tree["rewards"][0]["normalise"] = "running"
        return write_recipe(file, tree)

    train_rl(write("reference"))
    generate, calls = NativeEngine.generate, []

    def generate_or_stop(self, requests, sampling):
        calls.append(sampling.step)
        if calls.count(2) == 2:
            raise error
        return generate(self, requests, sampling)

    file = write("stopped")
    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "generate", generate_or_stop)
        with pytest.raises(PlauditError, match=message):
            train_rl(file)
    train_rl(file)
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "reference")
    state = "checkpoints/step_000003/state.json"
    assert (tmp_path / "stopped" / state).read_bytes() == (tmp_path / "reference" / state).read_bytes()


def test_the_first_round_takes_the_usual_prompts(tmp_path, recipe):
    """Those that the step would take without dynamic sampling."""
    order = RowOrder(24, per_step=4, epochs=100, seed=0)
    stream = RowStream(order)
    assert stream.ahead(0, 4) == order.rows(0)
    assert stream.ahead(4, 4) == order.rows(1)
    stream.taken = 22
    assert stream.ahead(0, 4) == [*order.rows(5)[2:], *order.rows(6)[:2]]


@pytest.mark.parametrize("kind", ["reinforce++", "remax"])
def test_refused_by_kinds_that_do_not_compare_groups(recipe, kind):
    with pytest.raises(RecipeError, match=r"dynamic_sampling has no effect: .* does not compare groups"):
        train_rl(recipe(kind=kind))
