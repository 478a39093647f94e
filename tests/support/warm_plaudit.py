"""A `plaudit` command for shell scripts that is forked from a process that has imported torch already: each saves seven seconds.

    python warm_plaudit.py SOCKET             the server; SOCKET exists when it is ready
    python warm_plaudit.py SOCKET sft R.yaml  a client: passes on its arguments, folder, environment and files, and exits as they do

Commands run as they do by themselves, in a process of their own; only signals to the client do not reach them.
"""

import gc
import json
import os
import signal
import socket
import sys


def serve(path: str) -> None:
    import pandas  # noqa: F401  # pyarrow imports it when it makes its first table
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import plaudit.doctor.checkup
    import plaudit.loops.ask
    import plaudit.loops.train  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # finished commands are reaped
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen()
    listener.settimeout(5)
    parent = os.getppid()
    os.rename(f"{path}.new", path)
    while os.getppid() == parent:  # it does not outlive the tests
        try:
            client, _ = listener.accept()
        except TimeoutError:
            continue
        client.setblocking(True)
        if os.fork() == 0:
            run(client)
        client.close()


def run(client: socket.socket) -> None:
    """One command, in a process of its own that ends with it."""
    gc.freeze()  # what was imported before is not searched for garbage
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    request = json.loads(client.makefile("rb").read())
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["plaudit", *request["arguments"]]
    status = 1
    try:
        from plaudit.cli import main

        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        client.sendall(bytes([status]))
        os._exit(status)


def call(path: str, arguments: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(server, [b"-"], [0, 1, 2])
        server.sendall(json.dumps(request).encode())
        server.shutdown(socket.SHUT_WR)
        status = server.recv(1)
    return status[0] if status else 137  # it was killed


if __name__ == "__main__":
    sys.exit(call(sys.argv[1], sys.argv[2:])) if len(sys.argv) > 2 else serve(sys.argv[1])
