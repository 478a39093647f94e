"""Attacks on worker processes: code in one of them forges, doubles or replays answers, closes descriptors, eats memory, and leaves
daemons behind. The samples around it have their own scores, in their places."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import psutil
import pytest

from plaudit.errors import RecipeError
from plaudit.rewards.functions import channel, guard, process
from plaudit.rewards.functions.function import FunctionLimits
from plaudit.rewards.rules.math import Math
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Failure, ScoredGroup
from support.paths import TESTS
from support.processes import gone
from support.rewards import collect, function, group, values

HOSTILE = dedent("""
    import ctypes, gc, json, os, signal, stat, subprocess, sys, time
    from pathlib import Path
    from plaudit.rewards.functions import channel

    def compute_score(solution_str, extra_info, folder=None):
        act = globals().get("act_" + solution_str)
        return float(solution_str) if act is None else act(folder) if folder else act()

    def descriptors():
        for number in range(3, 10000):
            try:
                os.fstat(number)
                yield number
            except OSError:
                pass

    def connection():
        return next(number for number in descriptors() if stat.S_ISSOCK(os.fstat(number).st_mode))

    def workers_end():
        return next(found for found in gc.get_objects() if isinstance(found, channel.WorkerEnd))

    def write_everywhere(text):
        for number in descriptors():
            try:
                os.write(number, text)
            except OSError:
                pass
        return 7.0

    def act_stray_line(): return write_everywhere(b"debug: 1.0\\n")
    def act_stray_newline(): return write_everywhere(b"\\n")
    def act_zeros(): return write_everywhere(bytes(1000))
    def act_answer_without_a_key(): return write_everywhere(b'{"value": 99.0}\\n')
    def act_answer_with_a_wrong_key():
        return write_everywhere(channel.sign(b'{"value": 99.0}', os.urandom(channel.KEY_BYTES), workers_end()._number))
    def act_endless_answer():
        return write_everywhere(channel.HEADER.pack(bytes(8), 2**32 - 1, bytes(16)))

    sent = []
    def act_record():
        def write(number, text, send=channel.write):
            sent.append(bytes(text))
            return send(number, text)
        channel.write = write
        return 5.0
    def act_replay():
        os.write(connection(), sent[-1])
        return 6.0
    def act_answer_twice():
        def write(number, text, send=channel.write):
            return send(number, bytes(text) * 2)  # at once, so that both are there when the next call is made
        channel.write = write
        return 5.0

    def act_take_the_key():
        forged = channel.sign(b'{"value": 99.0}', os.read(connection(), channel.KEY_BYTES), workers_end()._number)
        os.write(connection(), forged)
        return 5.0
    def act_read_everything():
        os.set_blocking(connection(), False)
        while os.read(connection(), 65536): pass

    def act_print():
        for answer in (b"1.0\\n", b'{"value": 99.0}\\n', bytes(100)):
            print(answer)
            os.write(1, answer)
            os.write(2, answer)
        return 5.0
    def act_close_all():
        os.closerange(0, 10000)
        return 5.0
    def act_close_and_open():
        os.closerange(0, 10000)
        for _ in range(20): os.open("/dev/null", os.O_RDWR)
        return 5.0
    def act_exit(): os._exit(0)
    def act_fork():
        return 5.0 if os.fork() else 99.0
    def act_fork_unnoticed():
        return 5.0 if ctypes.CDLL(None).fork() else 99.0
    def act_forked_child_writes():
        if os.fork() == 0:
            write_everywhere(b"1.0\\n")
            os._exit(0)
        os.wait()
        return 5.0
    def act_subprocess_writes():
        code = "import os\\nfor number in range(3, 10000):\\n  try: os.write(number, b'1.0')\\n  except OSError: pass"
        subprocess.run([sys.executable, "-c", code], close_fds=False, check=True)
        return 5.0

    def fill():
        kept = []
        while True: kept.append(b"x" * 2**22)
    def act_eat(): fill()
    def act_child_eats():
        if os.fork() == 0: fill()
        time.sleep(1000)

    def act_share():
        table = b"x" * 100_000_000
        read_end, write_end = os.pipe()
        children = []
        for _ in range(5):
            if (child := os.fork()) == 0:
                os.close(write_end)
                os.read(read_end, 1)  # until the parent has closed the pipe
                os._exit(len(table) & 1)
            children.append(child)
        time.sleep(0.5)  # the guard looks several times
        os.close(write_end)
        for child in children: os.waitpid(child, 0)
        return 5.0

    def daemon(folder):
        if (child := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 10000)
                aside = Path(folder, "aside")
                aside.write_text(str(os.getpid()))
                aside.rename(Path(folder, "daemon"))
                time.sleep(1000)
            os._exit(0)
        os.waitpid(child, 0)
        while not Path(folder, "daemon").exists(): time.sleep(0.001)
    def act_daemon(folder):
        daemon(folder)
        return 5.0
    def act_daemon_then_hang(folder):
        daemon(folder)
        time.sleep(1000)
    def act_daemon_then_exit(folder):
        daemon(folder)
        os._exit(3)
    def act_daemon_then_kill_the_guard(folder):
        daemon(folder)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    def act_daemon_then_stop_the_guard(folder):
        daemon(folder)
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(3)

    def act_dump_memory(folder):
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory, open(Path(folder, "dump"), "wb") as dump:
            for line in maps:
                area, rights, *_ = line.split()
                if rights.startswith("rw"):
                    start, end = (int(number, 16) for number in area.split("-"))
                    memory.seek(start)
                    dump.write(memory.read(end - start))
        return 5.0
""")


@pytest.fixture
def hostile(tmp_path) -> Path:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    return path


def failure(scored: ScoredGroup, index: int) -> Failure:
    found = scored.scores[index].failure
    assert found is not None
    return found


# Answers -------------------------------------------------------------------------------------------------------------

MISMATCHED = {
    "stray_line": "debug: 1.0",
    "stray_newline": r"\\n",
    "zeros": r"\\x00",
    "answer_without_a_key": "99.0",
    "answer_with_a_wrong_key": "99.0",
    "endless_answer": r"\\xff",
}


def test_stray_and_forged_answers_fail_their_sample_and_shift_no_other(hostile):
    groups = [group("1", "2", act, "3", "4", id=act) for act in MISMATCHED]
    for scored in collect(function(hostile), *groups):
        assert values(scored) == [1.0, 2.0, None, 3.0, 4.0]
        assert failure(scored, 2).cause == "tampered"
        assert re.search(f"wrote b.*{MISMATCHED[scored.group.prompt.id]}.* to its connection", failure(scored, 2).message)


def test_an_earlier_answer_cannot_be_replayed(hostile):
    [scored] = collect(function(hostile), group("record", "1", "replay", "2", "3"))
    assert values(scored) == [5.0, 1.0, None, 2.0, 3.0]
    assert failure(scored, 2).cause == "tampered"


def test_the_second_of_two_answers_is_not_the_next_calls(hostile):
    [scored] = collect(function(hostile), group("1", "answer_twice", "2", "3", "4"))
    assert values(scored) == [1.0, 5.0, None, 3.0, 4.0]
    assert failure(scored, 2).cause == "tampered"


def test_what_comes_between_calls_replaces_the_worker_and_fails_nothing(hostile):
    with RewardRunner([function(hostile)]) as rewards:
        [first] = rewards.collect([group("answer_twice", id="first")])
        [second] = rewards.collect([group("1", "2", id="second")])
    assert values(first) == [5.0]
    assert values(second) == [1.0, 2.0]


@pytest.mark.parametrize("texts", [["take_the_key", "1", "2"], ["take_the_key"]], ids=["within a batch", "at its end"])
def test_code_that_takes_its_key_sets_its_own_score_and_no_other(hostile, texts):
    """The limit of what can be prevented inside one process; the worker is killed at the next answer."""
    with RewardRunner([function(hostile)]) as rewards:
        [first] = rewards.collect([group(*texts, id="first")])
        [second] = rewards.collect([group("3", "4", "5", id="second")])
    got = [*values(first), *values(second)]
    assert got == [99.0, None, *[float(text) for text in [*texts, "3", "4", "5"][2:]]]


def test_code_that_reads_the_connection_ends_its_worker(hostile):
    [scored] = collect(function(hostile), group("1", "read_everything", "2", "3"))
    assert values(scored) == [1.0, None, 2.0, 3.0]
    assert failure(scored, 1).cause == "died"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="reads its own memory through /proc")
def test_the_key_of_a_call_is_not_in_memory_while_the_function_runs(hostile, tmp_path, monkeypatch):
    drawn: list[bytes] = []

    def new_keys(count: int, draw=channel.new_keys) -> list[bytes]:
        drawn.extend(keys := draw(count))
        return keys

    monkeypatch.setattr(channel, "new_keys", new_keys)
    [scored] = collect(function(hostile, arguments={"folder": str(tmp_path)}), group("dump_memory"))
    assert values(scored) == [5.0]
    dump = (tmp_path / "dump").read_bytes()
    assert b"act_dump_memory" in dump, "not the memory of the process"
    _start, key = drawn
    assert key not in dump
    assert key[channel.OPENING_BYTES :] not in dump


# Descriptors, forks, exits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["print", "fork", "fork_unnoticed", "forked_child_writes", "subprocess_writes"])
def test_output_and_children_cannot_answer(hostile, act):
    [scored] = collect(function(hostile), group("1", act, "2", act, "3"))
    assert values(scored) == [1.0, 5.0, 2.0, 5.0, 3.0]


@pytest.mark.parametrize("act", ["close_all", "close_and_open", "exit"])
def test_a_worker_that_cannot_answer_fails_its_sample(hostile, act):
    [scored] = collect(function(hostile), group("1", act, "2", "3"))
    assert values(scored) == [1.0, None, 2.0, 3.0]
    assert failure(scored, 1).cause == "died"
    assert re.search("exit code 0" if act == "exit" else "connection to plaudit was closed", failure(scored, 1).message)


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["here", "without subreapers"])
def system(request, monkeypatch) -> str:
    """The guard as on this system, and as on one that can neither adopt orphans nor look at children without reaping them."""
    if request.param == "without subreapers":
        less = "from plaudit.rewards.functions import guard; guard.prctl = lambda *_: False; import os; vars(os).pop('waitid', 0); "
        monkeypatch.setattr(process, "PROGRAM", process.PROGRAM.replace("main(", f"{less}main("))
    return request.param


@pytest.mark.parametrize("act", ["eat", "child_eats"])
@pytest.mark.usefixtures("system")
def test_a_function_that_eats_memory_fails_its_sample(hostile, act):
    limits = FunctionLimits(worker_memory_gb=0.2, timeout_s=100.0)
    [scored] = collect(function(hostile, limits=limits), group("1", act, "2", "3"))
    assert values(scored) == [1.0, None, 2.0, 3.0]
    assert failure(scored, 1).cause == "memory"
    assert re.search(r"it used \d+\.\d\d GB with its children; limits\.worker_memory_gb is 0\.2", failure(scored, 1).message)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not say what processes share")
@pytest.mark.usefixtures("system")
def test_memory_that_forked_children_share_counts_once(hostile):
    limits = FunctionLimits(worker_memory_gb=0.3, timeout_s=100.0)
    [scored] = collect(function(hostile, limits=limits), group("1", "share", "2"))
    assert values(scored) == [1.0, 5.0, 2.0]


class EndedProcesses:
    """Two of them, that were read a moment ago."""

    def members(self) -> list[int]:
        return [-1, -2]

    def resident(self) -> dict[int, int]:
        return {-1: 10, -2: 20}


def test_a_member_whose_shared_memory_is_unknown_counts_in_full(monkeypatch):
    monkeypatch.setattr(guard, "MEMORY_FILE", "/nowhere/{}")
    assert guard.memory_used(EndedProcesses(), limit=15) == 30


@pytest.mark.skipif(not Path(guard.MEMORY_FILE.format("self")).exists(), reason="the system does not say what processes share")
def test_a_member_that_has_just_ended_holds_no_memory():
    assert guard.memory_used(EndedProcesses(), limit=15) == 0


def test_children_of_an_idle_worker_are_searched_for_only_now_and_then(monkeypatch):
    searches, switches = [], [1]

    def children(process, recursive):
        searches.append(process.pid)
        return [psutil.Process()]

    monkeypatch.setattr(psutil.Process, "children", children)
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda _: SimpleNamespace(user=1.0, system=0.0))
    monkeypatch.setattr(psutil.Process, "num_ctx_switches", lambda _: (switches[0], 0))
    monkeypatch.setattr(guard, "SEARCH_EVERY_S", 1e9)
    tree = guard.SearchedTree("mark")

    def searches_of(looks: int) -> int:
        before = len(searches)
        assert all(tree.resident()[os.getpid()] > 0 for _ in range(looks))
        return len(searches) - before

    assert searches_of(2) == 2  # the first finds the worker
    assert searches_of(5) == 0
    switches[0] += 1  # it may have started a child
    assert searches_of(5) == 1
    monkeypatch.setattr(guard, "SEARCH_EVERY_S", 0.0)
    tree.members()
    assert searches_of(5) == 5


def test_a_file_that_needs_more_memory_than_the_limit_is_reported_at_the_start(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("table = b'x' * 300_000_000\nimport time\ntime.sleep(1000)\ndef compute_score(solution_str): return 1\n")
    reward = function(path, limits=FunctionLimits(worker_memory_gb=0.2))
    with pytest.raises(RecipeError, match=r"cannot be imported: it used .* GB .*worker_memory_gb is 0.2"):
        RewardRunner([reward]).__enter__()


def test_an_answer_that_eats_memory_is_malformed_for_math(monkeypatch, tmp_path):
    """As for one that hangs: dropping the sample would teach the policy to write such answers."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "def compare(solution_str, ground_truth, key, **settings):\n kept = []\n while True: kept.append(b'x' * 2**22)\n"
    )
    monkeypatch.setattr("plaudit.rewards.rules.math.WORKER", worker)
    reward = Math.model_validate({"kind": "math", "workers": 1, "limits": {"worker_memory_gb": 0.2}})
    [scored] = collect(reward, group(r"\boxed{x^2 + \sqrt{y}}", truth=r"\sqrt{y} + xx"))
    [score] = scored.scores
    assert (score.value, score.malformed) == (0.0, True)


# Daemons -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["daemon", "daemon_then_exit", "daemon_then_hang"])
@pytest.mark.usefixtures("system")
def test_a_daemon_ends_with_its_worker(hostile, tmp_path, act):
    limits = FunctionLimits(timeout_s=3.0 if act == "daemon_then_hang" else 100.0)
    reward = function(hostile, arguments={"folder": str(tmp_path)}, limits=limits)
    with RewardRunner([reward]) as rewards:
        [scored] = rewards.collect([group("1", act, "2")])
        if act != "daemon":
            assert gone(int((tmp_path / "daemon").read_text()))
    assert values(scored) == [1.0, 5.0 if act == "daemon" else None, 2.0]
    assert gone(int((tmp_path / "daemon").read_text()))


@pytest.mark.parametrize("act", ["kill_the_guard", pytest.param("stop_the_guard", marks=pytest.mark.slow)])
def test_a_daemon_ends_when_its_worker_has_attacked_the_guard(hostile, tmp_path, act):
    [scored] = collect(function(hostile, arguments={"folder": str(tmp_path)}), group("1", f"daemon_then_{act}", "2"))
    assert values(scored) == [1.0, None, 2.0]
    assert failure(scored, 1).cause == "died"
    assert gone(int((tmp_path / "daemon").read_text()))


def test_a_daemon_ends_when_plaudit_is_killed(hostile, tmp_path):
    program = tmp_path / "program.py"
    settings = {"limits": {"timeout_s": 1000.0}, "arguments": {"folder": str(tmp_path)}}
    program.write_text(
        dedent(f"""
        import os, sys, time
        sys.path.insert(0, {str(TESTS)!r})
        from support.rewards import RewardRunner, function, group
        with RewardRunner([function({str(hostile)!r}, **{settings})]) as rewards:
            if (child := os.fork()) == 0:  # it holds our end of every connection
                time.sleep(1000)
            open({str(tmp_path / "child")!r}, "w").write(str(child))
            rewards.collect([group("daemon_then_hang")])
        """)
    )
    parent = subprocess.Popen([sys.executable, str(program)])
    daemon, deadline = tmp_path / "daemon", time.monotonic() + 200
    try:
        while not daemon.exists() and time.monotonic() < deadline and parent.poll() is None:
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
    try:
        assert gone(int(daemon.read_text()))
    finally:
        os.kill(int((tmp_path / "child").read_text()), 9)
