"""What ranks report through their pipe arrives line by line, whatever their threads do at the same time."""

import json
import os
import threading

from plaudit.cluster.status import RankFailure, StatusPipe


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
    status.beat("the end", waiting=True)
    os.close(write)
    reader.join(60)
    os.close(read)
    messages = [json.loads(line) for line in b"".join(received).splitlines()]
    assert messages[0]["failure"]["message"] == failure.message
    assert messages[1:] == [{"doing": "the end", "waiting": True}]
