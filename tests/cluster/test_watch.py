"""Who is to blame: decided from reports, ends and silence, on a clock of the test's own."""

import signal

import pytest

from plaudit.cluster.status import RankFailure
from plaudit.cluster.watch import CULPRIT_S, SAME_ERROR_S, START_S, Watch, hanging_frames
from plaudit.errors import DataError, Interrupted, PeerFailed, PeerLost, ProcessFailed, TrainingStopped

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4321")


def because_of(cause: BaseException, error: BaseException) -> BaseException:
    error.__context__ = cause
    return error


class WatchedRanks(Watch):
    """Three of them, at work in step 3."""

    def __init__(self, timeout_s: float = 60.0):
        self.now = 0.0
        super().__init__(3, timeout_s, clock=lambda: self.now)
        for rank in range(3):
            self.beat(rank)

    def beat(self, rank: int, doing: str = "step 3, sampling", waiting: bool = False) -> None:
        self.heard(rank, {"doing": doing, "waiting": waiting})

    def fails(self, rank: int, error: BaseException) -> None:
        self.heard(rank, {"failure": vars(RankFailure.of(error))})

    def error(self) -> BaseException | None:
        verdict = self.verdict()
        return None if verdict is None else verdict.error


@pytest.fixture
def ranks() -> WatchedRanks:
    return WatchedRanks()


def test_nothing_happens_while_all_work(ranks):
    assert ranks.verdict() is None
    assert not ranks.all_done


def test_all_done(ranks):
    for rank in range(3):
        ranks.heard(rank, {"done": f"result {rank}"})
    assert ranks.all_done
    assert ranks.ranks[0].result == "result 0"
    ranks.ended(0, 0)
    assert ranks.verdict() is None


def test_the_culprit_is_waited_for(ranks):
    """Its peers may report their lost connections before it is seen to have ended."""
    ranks.fails(0, GLOO)
    ranks.fails(2, GLOO)
    assert ranks.verdict() is None
    ranks.ended(1, -signal.SIGKILL)
    assert str(ranks.error()).startswith("rank 1 (step 3, sampling) was killed by SIGKILL, as happens when the system's memory")


def test_without_a_culprit_the_first_one_speaks(ranks):
    ranks.fails(2, GLOO)
    ranks.now = CULPRIT_S
    error = ranks.error()
    assert isinstance(error, ProcessFailed)
    assert str(error).startswith("rank 2 (step 3, sampling) lost its connection to the others: RuntimeError: [gloo/")


def test_a_lost_connection_in_a_user_error_is_no_cause_either(ranks):
    ranks.fails(0, because_of(GLOO, TrainingStopped(f"the engine failed: {GLOO}")))
    ranks.fails(1, KeyError("a bug"))
    ranks.now = SAME_ERROR_S
    assert "rank 1 (step 3, sampling) failed: KeyError: 'a bug'" in str(ranks.error())


@pytest.mark.parametrize(
    "noticed",
    [
        PeerLost("the process with rank 1 cannot be reached any more"),
        PeerFailed("rank 1: KeyError: 'a bug'"),
        because_of(PeerLost("rank 1 is gone"), TrainingStopped("step 3: rank 1 is gone")),
    ],
    ids=["lost", "failed", "lost in step 3"],
)
def test_whoever_lost_the_owner_of_a_reward_model_is_not_to_blame(ranks, noticed):
    ranks.fails(0, noticed)
    ranks.fails(1, KeyError("a bug"))
    ranks.now = SAME_ERROR_S
    assert "rank 1 (step 3, sampling) failed: KeyError: 'a bug'" in str(ranks.error())


def test_a_user_s_error_is_not_judged_by_its_text(ranks):
    ranks.fails(1, TrainingStopped("reward 'nccl': no answer from http://gloo/NCCL"))
    ranks.fails(0, PeerLost("the process with rank 1 cannot be reached any more"))
    ranks.fails(2, GLOO)
    assert str(ranks.error()).startswith("rank 1 (step 3, sampling): reward 'nccl'")


def test_the_same_mistake_of_all_ranks_has_no_rank(ranks):
    for rank in (2, 1, 0):
        ranks.fails(rank, DataError("rows.jsonl:3: has no prompt"))
    error = ranks.error()
    assert type(error) is DataError
    assert str(error) == "rows.jsonl:3: has no prompt"


def test_a_mistake_of_one_rank_names_it_after_a_moment(ranks):
    ranks.fails(2, DataError("a full disk"))
    ranks.now = SAME_ERROR_S
    assert ranks.verdict() is None, "the others may report the same"
    for rank in (0, 1):
        ranks.beat(rank, "scored groups", waiting=True)  # for rank 2, so they will not
    assert str(ranks.error()) == "rank 2 (step 3, sampling): a full disk"


def test_the_leading_rank_has_time_to_save(ranks):
    for rank in (1, 2):
        ranks.fails(rank, Interrupted("stopped"))
        ranks.ended(rank, 1)
    ranks.now = 59.0
    assert ranks.verdict() is None
    ranks.fails(0, Interrupted("stopped after step 3, saved"))
    assert str(ranks.error()) == "stopped after step 3, saved"


def test_an_interruption_is_rank_0_s(ranks):
    ranks.fails(1, Interrupted("stopped during step 4"))
    ranks.fails(0, Interrupted("stopped during step 4; step 3 is saved. Resume with: …"))
    ranks.fails(2, GLOO)
    error = ranks.error()
    assert isinstance(error, Interrupted)
    assert "step 3 is saved" in str(error)


def test_a_silent_rank_is_blamed_and_not_those_that_wait_for_it(ranks):
    ranks.beat(0, "scored groups", waiting=True)
    ranks.now = 30.0
    ranks.beat(2)
    ranks.now = 61.0
    verdict = ranks.verdict()
    assert verdict is not None
    assert (verdict.rank, verdict.silent) == (1, (1,))
    assert str(verdict.error).startswith(
        "rank 1 (step 3, sampling) has made no progress for 60 s. If it was still at work, raise cluster.timeout_s."
    )


def test_of_several_silent_ranks_the_first_is_blamed_and_all_are_named(ranks):
    ranks.beat(2, "step 3, training")
    ranks.now = 5.0
    ranks.beat(0)
    ranks.beat(1, "scored groups", waiting=True)
    ranks.now = 70.0
    verdict = ranks.verdict()
    assert verdict is not None
    assert (verdict.rank, verdict.silent) == (2, (0, 2))
    assert "rank 2 (step 3, training) has made no progress for 60 s, nor have rank 0 (step 3, sampling). If" in str(verdict.error)


def test_ranks_that_fall_silent_one_after_the_other_are_named_together(ranks):
    ranks.now = 0.4
    ranks.beat(1)
    ranks.now = 0.8
    ranks.beat(2)
    ranks.now = 60.5
    assert ranks.verdict() is None  # two are silent, and the third may be
    ranks.now = 60.9
    verdict = ranks.verdict()
    assert verdict is not None
    assert (verdict.rank, verdict.silent) == (0, (0, 1, 2))


def test_a_silent_rank_is_not_waited_for_because_others_work(ranks):
    for second in range(61):
        ranks.now = float(second)
        ranks.beat(0)
        ranks.beat(1)
        assert ranks.verdict() is None
    ranks.now = 60.0 + SAME_ERROR_S
    verdict = ranks.verdict()
    assert verdict is not None
    assert (verdict.rank, verdict.silent) == (2, (2,))


def test_a_rank_that_works_may_be_waited_for_for_ever(ranks):
    ranks.beat(0, "scored groups", waiting=True)
    ranks.beat(2, "scored groups", waiting=True)
    for minute in range(100):
        ranks.now = 59.0 * minute
        ranks.beat(1)
        assert ranks.verdict() is None


def test_all_wait(ranks):
    for rank, what in enumerate(("scored groups", "scored groups", "metrics of an update")):
        ranks.beat(rank, what, waiting=True)
    ranks.now = 61.0
    verdict = ranks.verdict()
    assert verdict is not None
    assert verdict.silent == (0, 1, 2)
    message = str(verdict.error)
    assert message.startswith("all processes have waited for each other for 60 s: rank 0 (step 3, sampling) for 'scored groups', ")
    assert "raise cluster.timeout_s" in message
    assert "rank 2 (step 3, sampling) for 'metrics of an update'" in message


def test_waiting_for_one_that_has_finished(ranks):
    ranks.heard(1, {"done": None})
    for rank in (0, 2):
        ranks.beat(rank, "scored groups", waiting=True)
    ranks.now = 61.0
    assert "; rank 1 has finished." in str(ranks.error())


def test_starting_may_take_longer():
    now = [0.0]
    ranks = Watch(1, 1.0, clock=lambda: now[0])
    now[0] = START_S - 1
    assert ranks.verdict() is None
    now[0] = START_S + 1
    verdict = ranks.verdict()
    assert verdict is not None
    assert "rank 0 (starting) has made no progress for 300 s" in str(verdict.error)


def test_a_suspended_run_was_not_silent(ranks):
    ranks.now = 1000.0
    ranks.resumed()
    assert ranks.verdict() is None


def test_where_a_rank_hangs():
    dump = """Thread 0x00007f (most recent call first):
  File "/x/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007e (most recent call first):
  File "/x/lib/python3.11/site-packages/torch/nn.py", line 5 in forward
  File "/x/lib/python3.11/site-packages/torch/nn.py", line 7 in call
  File "/home/me/reward.py", line 12 in score
  File "/home/me/plaudit/rl/collect.py", line 30 in collect
  File "/home/me/plaudit/loops/rl.py", line 80 in train
"""
    assert hanging_frames(dump) == (
        "/x/lib/python3.11/site-packages/torch/nn.py:5 in forward, called from /home/me/reward.py:12 in score, called from "
        "/home/me/plaudit/rl/collect.py:30 in collect"
    )
    assert hanging_frames("") == ""


# Reward workers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_worker() -> Watch:
    watch = Watch(2, 60.0, clock=lambda: 0.0, workers=["models/judge"])
    for rank in range(3):
        watch.heard(rank, {"doing": "scoring", "waiting": False})
    return watch


def test_workers_end_after_the_ranks(with_worker):
    for rank in range(2):
        with_worker.heard(rank, {"done": None})
    assert with_worker.all_done
    assert with_worker.verdict() is None


def test_a_lost_worker_is_to_blame(with_worker):
    """Not the ranks that noticed it first."""
    with_worker.heard(0, {"failure": vars(RankFailure.of(PeerLost("gone")))})
    with_worker.ended(2, -signal.SIGKILL)
    for rank in range(2):
        with_worker.ended(rank, 1)
    verdict = with_worker.verdict()
    assert verdict is not None
    assert str(verdict.error).startswith("reward worker 0 (models/judge, scoring) was killed by SIGKILL")


def test_ranks_that_wait_for_each_other_are_found_beside_a_worker():
    now = [0.0]
    watch = Watch(2, 60.0, clock=lambda: now[0], workers=["models/judge"])
    for rank in range(2):
        watch.heard(rank, {"doing": "the end", "waiting": True})
    now[0] = 61.0
    watch.heard(2, {"doing": "scoring", "waiting": False})
    verdict = watch.verdict()
    assert verdict is not None
    assert "all processes have waited for each other" in str(verdict.error)
