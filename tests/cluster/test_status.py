"""What ranks report through their pipe arrives line by line, whatever their threads do at the same time."""

import json
import os
import threading

from plaudit.cluster.status import RankFailure, StatusPipe
from plaudit.errors import ServerGone, TrainingStopped
from plaudit.rollout.served.server import Refused


def test_an_error_that_a_module_derives_from_ours_stays_what_it_is():
    """Otherwise a server that refuses a request would be a process that failed, and all ranks would start again."""
    failure = RankFailure.of(Refused("HTTP 400"))
    assert type(failure.error("said")) is TrainingStopped
    assert not failure.error("said").restart_helps
    assert type(RankFailure.of(ServerGone("gone")).error("said")) is ServerGone


def test_heartbeats_do_not_interleave_with_a_longer_message():
    """It is more than a pipe takes at once, so that its writer waits while another thread beats."""
    read, write = os.pipe()
    status = StatusPipe(write)
    failure = RankFailure("ZeroDivisionError", "x" * 2**20)
    writer = threading.Thread(target=status.failed, args=(failure,))
    writer.start()
    received = [os.read(read, 1)]  # it has begun
    for number in range(100):
        status.beat(f"step {number}", waiting=False)
    reader = threading.Thread(target=lambda: received.extend(iter(lambda: os.read(read, 1 << 16), b"")))
    reader.start()
    writer.join(60)
    os.close(write)
    reader.join(60)
    os.close(read)
    [line] = b"".join(received).splitlines()
    assert json.loads(line)["failure"]["message"] == failure.message


def test_threads_beat_at_the_same_time():
    """None of their heartbeats is dropped: one that says that a rank waits may be its last for hours."""
    read, write = os.pipe()
    status = StatusPipe(write)
    expected = {(f"thread {thread}, step {step}", True) for thread in range(4) for step in range(50)}

    def beat(thread: int) -> None:
        for step in range(50):
            status.beat(f"thread {thread}, step {step}", waiting=True)

    threads = [threading.Thread(target=beat, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    os.close(write)
    with os.fdopen(read) as file:
        received = [json.loads(line) for line in file]
    assert {(message["doing"], message["waiting"]) for message in received} == expected
