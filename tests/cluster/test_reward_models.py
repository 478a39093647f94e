"""RL by several processes with reward models: one process has each, and samples and scores are those of one process."""

from collections import Counter
from pathlib import Path

import pytest

from plaudit.models.scalar import scalar_blocks
from plaudit.recipe.reward_models import RewardModel
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
    loads = not self.on_device
    load(self)
    if loads:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        with open(os.environ["LOADS"], "a") as file:
            file.write(f"{os.environ['RANK']} {Path(self._name).name} {parameters}\\n")

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
    loaded = Counter(line.rpartition(" ")[0] for line in loads.read_text().splitlines())
    assert loaded == {"0 scalar": 1, "1 grader": 1, f"{2 % size} grader": 2}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[1, 0], [2, 0, 1]], ids=str)
def test_rl_with_a_divided_reward_model(tmp_path, tiny_model, prompts_file, ranks):
    """Each process loads its block only, and the run is that of an undivided model, to the bit."""
    scalar, loads = make_classifier(tiny_model, tmp_path / "scalar", num_hidden_layers=3), tmp_path / "loads"

    def run(name: str, rank: int | list[int]) -> Path:
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / name, {}, run={"deterministic": True}, optim={"lr": 1e-4})
        tree["rewards"] = [{"kind": "scalar_model", "model": {"path": str(scalar), "rank": rank}}]
        scripts = dict.fromkeys(range(len(ranks)), NOTE_LOADS)
        recipe = write_recipe(tmp_path / f"{name}.yaml", tree)
        started = start_ranks(len(ranks), "rl", recipe, scripts=scripts, LOADS=str(loads))
        outputs = [command.output for command in started if command.wait()]
        assert not outputs, "\n".join(outputs)
        return tmp_path / name

    undivided = run("undivided", 0)
    loads.unlink()
    divided = run("divided", ranks)
    assert samples(divided, but=()) == samples(undivided, but=())
    assert differences(divided, undivided, relative=0.0, absolute=0.0) == {}
    assert weight_difference(divided, undivided) == 0.0
    blocks = scalar_blocks(RewardModel(path=str(scalar), rank=tuple(ranks)))
    bias = 1  # of the head, which adds zero
    assert set(loads.read_text().splitlines()) == {
        f"{rank} scalar {block.parameters + bias * block.is_last}" for rank, block in zip(ranks, blocks, strict=True)
    }
