"""Several processes (gloo) make the same update as one, for every loss and with dropout; with a sharded optimiser, to the bit.

Each of them runs `support.world.main`.
"""

import queue
import threading
import time

import pytest
import torch

from plaudit.train.gradients import parse_key
from plaudit.world import Heartbeat, SecondHeartbeat, World
from support.processes import Command
from support.world import CASES, FULLY_SHARDED_CASES, SHARDED_CASES, UPDATES, outcome


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def processes(request, tiny_models, pairs_file, tmp_path_factory) -> list[dict[str, dict[str, dict]]]:
    """Each process's results of every case, by sharding."""
    scratch = tmp_path_factory.mktemp("ranks")
    given, script = (tiny_models["qwen2"], pairs_file, scratch), "from support.world import main; main()"
    for process in [Command(*given, rank, request.param, script=script) for rank in range(request.param)]:
        assert process.wait() == 0, process.output
    return [torch.load(scratch / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("name", CASES)
def test_several_processes_make_the_same_update_as_one(tiny_models, pairs_file, processes, name):
    alone = outcome(CASES[name], tiny_models["qwen2"], pairs_file, World.alone())
    one, *others = (result["none"][name] for result in processes)
    for other in others:
        assert one["metrics"] == other["metrics"]
        for parameter, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][parameter]), parameter
    assert alone["micro_batches"] == 1 if "one micro-batch" in name else alone["micro_batches"] > 2
    updates = list(zip(one["metrics"], alone["metrics"], strict=True))
    for ours, expected in updates[: len(updates) // UPDATES]:
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for ours, expected in updates[len(updates) // UPDATES :]:
        assert ours == pytest.approx(expected, rel=1e-3, abs=1e-4)  # Adam has divided by tiny gradients
    assert alone["first"].keys() == one["first"].keys()
    total_norm = torch.cat([moment.flatten() for moment in alone["first"].values()]).norm()
    assert total_norm > 0
    for parameter, moment in alone["first"].items():
        assert (one["first"][parameter] - moment).norm() <= 2e-6 * max(moment.norm(), 1e-3 * total_norm), parameter


@pytest.mark.parametrize("name", SHARDED_CASES)
def test_a_sharded_optimiser_computes_the_same_bits(processes, name):
    for result in processes:
        whole, sharded = result["none"][name], result["optimiser"][name]
        assert whole["metrics"] == sharded["metrics"]
        for parameter, weight in whole["weights"].items():
            assert torch.equal(weight, sharded["weights"][parameter]), parameter
    states = [result["optimiser"][name]["first"] for result in processes]
    assert all(states), "each process has a part of the state"
    assert not set.intersection(*(set(state) for state in states)), "and no two the same"
    assert sum(t.numel() for state in states for t in state.values()) == sum(
        t.numel() for t in processes[0]["none"][name]["first"].values()
    )


@pytest.mark.parametrize("name", FULLY_SHARDED_CASES)
def test_sharded_weights_get_the_same_update(processes, name):
    expected = processes[0]["none"][name]
    total_norm = torch.cat([moment.flatten() for moment in expected["first"].values()]).norm()
    elements = 0
    for result in processes:
        ours = result["full"][name]
        for one, other in zip(ours["metrics"], expected["metrics"], strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
        for key, moment in ours["first"].items():
            parameter, begin, end = parse_key(key)
            whole = expected["first"][parameter].flatten()
            difference = (moment.flatten() - whole[begin:end]).norm()
            assert difference <= 2e-6 * max(whole.norm(), 1e-3 * total_norm), key
            elements += moment.numel()
        weights, ours = (torch.cat([w.flatten() for w in one["weights"].values()]) for one in (expected, ours))
        assert (ours - weights).norm() <= 1e-6 * weights.norm()
    assert elements == sum(moment.numel() for moment in expected["first"].values()), "each process has a part of the state"


@pytest.mark.parametrize("sharding", ["none", "optimiser"])
def test_a_weight_without_a_gradient_in_any_process_is_left_alone(processes, sharding):
    """One with a gradient in a single process is not; without a gradient, a weight must not decay either."""
    for result in processes:
        uneven = result[sharding]["uneven gradients"]
        assert uneven["norm"] == pytest.approx(60**0.5)
        assert torch.equal(uneven["weights"]["none"], torch.ones(2, 2))
        for name in ("first", "last"):
            assert torch.allclose(uneven["weights"][name], torch.full((2, 2), 1 - 0.1 * 0.5 - 0.1), atol=1e-6)
    moments = {key for result in processes for key in result[sharding]["uneven gradients"]["state"] if key.startswith("exp_avg/")}
    assert moments == {"exp_avg/first", "exp_avg/last"}


def test_a_long_phase_beats_by_itself(monkeypatch):
    """But not while it waits for other processes, or one that hangs there would look like one that works."""
    monkeypatch.setattr("plaudit.world.PHASE_BEAT_S", 0.001)
    beats: queue.Queue[tuple[str, bool]] = queue.Queue()
    heartbeat = Heartbeat(lambda doing, waiting: beats.put((doing, waiting)))
    heartbeat.begin_phase("loading")
    assert [beats.get(timeout=60) for _ in range(3)] == 3 * [("loading", False)]
    heartbeat.beat("the others", waiting=True)
    while beats.get(timeout=60) != ("the others", True):
        pass
    time.sleep(0.02)
    late = [beats.get_nowait() for _ in range(beats.qsize())]
    assert len(late) <= 1, "one may have been on its way"
    heartbeat.beat()
    assert [beats.get(timeout=60) for _ in range(2)] == 2 * [("loading", False)]
    heartbeat.end_phase()


def test_heartbeats_without_progress_end(monkeypatch):
    """Or a process whose disk or reward model hangs would never be noticed."""
    beats = []
    heartbeat = Heartbeat(lambda doing, waiting: beats.append(doing))
    heartbeat.beat("step 1, sampling")
    heartbeat.beat_while_waiting()
    assert len(beats) == 2
    monkeypatch.setattr("plaudit.world.WITHOUT_PROGRESS_S", 0.0)
    heartbeat.beat_while_waiting()
    assert len(beats) == 2
    monkeypatch.setattr("plaudit.world.PHASE_BEAT_S", 0.001)
    heartbeat.begin_phase("saving step 1")
    time.sleep(0.02)
    heartbeat.end_phase()
    assert beats[2:] == ["saving step 1"], "the phase itself is news, its heartbeats are not"
    heartbeat.beat("step 2, sampling")
    assert len(beats) == 4


def test_a_second_threads_heartbeats_count_while_the_first_waits_for_it():
    """Otherwise a trainer that hangs would look alive for as long as others are sampled, and one that waits would look dead."""
    beats: list[tuple[str, bool]] = []
    first = Heartbeat(lambda doing, waiting: beats.append((doing, waiting)))
    second = SecondHeartbeat(first)

    def sample(doing: str | None, *, waiting: bool = False) -> None:
        thread = threading.Thread(target=second.beat, args=(doing,), kwargs={"waiting": waiting})
        thread.start()
        thread.join()

    first.beat("training")
    sample("sampling")
    assert beats == [("training", False)]
    second.pass_on()
    second.pass_on()
    assert beats[1:] == [("sampling", False)], "each is passed on once"
    sample("the others' groups", waiting=True)
    second.pass_on()
    second.beat("validation")
    assert beats[2:] == [("the others' groups", True), ("validation", False)], "in the first thread there is one heartbeat"
    second.beat_while_waiting()
    assert beats[4:] == [("validation", False)]
