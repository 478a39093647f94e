"""RL by several processes with reward models: one process has each, and samples and scores are those of one process."""

from collections import Counter
from pathlib import Path

import pytest

from support.models import make_classifier, make_grader
from support.ranks import differences, samples, start_ranks, train_with, weight_difference
from support.recipes import rl_recipe, write_recipe

NOTE_LOADS = """
import os
from pathlib import Path
from plaudit.cli import main
from plaudit.models.weights import OffloadableWeights

load = OffloadableWeights.load

def load_and_note(self):
    if not self.on_device:
        with open(os.environ["LOADS"], "a") as file:
            file.write(f"{os.environ['RANK']} {Path(self._name).name}\\n")
    load(self)

OffloadableWeights.load = load_and_note
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_rl_with_reward_models(tmp_path, tiny_model, prompts_file, size):
    scalar, grader = make_classifier(tiny_model, tmp_path / "scalar"), make_grader(tiny_model, tmp_path / "grader", seed=0)
    judge = {"kind": "judge", "sampling": {"max_new_tokens": 4}, "limits": {"unreadable_retries": 0}}

    def recipe(name: str) -> Path:
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / name, {}, run={"deterministic": True}, optim={"lr": 1e-4})
        tree["rewards"] = [
            {"kind": "scalar_model", "model": {"path": str(scalar)}, "normalise": "running"},
            {**judge, "name": "resident", "model": {"path": str(grader)}},
            {**judge, "name": "offloaded", "model": {"path": str(grader), "placement": "offload"}},
        ]
        return write_recipe(tmp_path / f"{name}.yaml", tree)

    train_with(1, "rl", recipe("alone"))
    loads = tmp_path / "loads"
    ranks = start_ranks(size, "rl", recipe("together"), scripts=dict.fromkeys(range(size), NOTE_LOADS), LOADS=str(loads))
    outputs = [command.output for command in ranks if command.wait()]
    assert not outputs, "\n".join(outputs)
    assert samples(tmp_path / "together") == samples(tmp_path / "alone")
    assert differences(tmp_path / "together", tmp_path / "alone") == {}
    # The third model goes to the third process, if there is one; it is loaded in each of the two steps.
    assert Counter(loads.read_text().splitlines()) == {"0 scalar": 1, "1 grader": 1, f"{2 % size} grader": 2}


@pytest.mark.slow
def test_rl_with_a_divided_reward_model(tmp_path, tiny_model, prompts_file):
    """Three processes, two of which have the layers of one model: the run is that of an undivided one, to the bit."""
    scalar = make_classifier(tiny_model, tmp_path / "scalar", num_hidden_layers=3)

    def run(name: str, rank: int | list[int]) -> Path:
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / name, {}, run={"deterministic": True}, optim={"lr": 1e-4})
        tree["rewards"] = [{"kind": "scalar_model", "model": {"path": str(scalar), "rank": rank}}]
        train_with(3, "rl", write_recipe(tmp_path / f"{name}.yaml", tree))
        return tmp_path / name

    undivided, divided = run("undivided", 0), run("divided", [2, 0])
    assert samples(divided, but=()) == samples(undivided, but=())
    assert differences(divided, undivided, relative=0.0, absolute=0.0) == {}
    assert weight_difference(divided, undivided) == 0.0
