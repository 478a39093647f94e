"""A Ray cluster of several nodes on this machine, started by `plaudit cluster up`, and commands that train on it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

from plaudit.servers.process import free_port
from support.paths import REPOSITORY
from support.processes import gone

LIMIT_S = 600.0


class RayNodes:
    """Each node has one CPU, and so one rank, unless `join` is given more. Everything has a mark in its environment, by which
    what is left over is found."""

    def __init__(self, home: Path):
        self.mark = uuid.uuid4().hex
        self._folders = [_short_folder()]
        self.environment = {
            **os.environ,
            "HOME": str(home),  # for the token
            "TMPDIR": self._folders[0],
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "STARTED_BY": self.mark,
        }
        self.explanation = self.run("cluster", "up", "--port", free_port(), "--cpus", 1).stdout
        self.address = self.explanation.split("--join ")[1].split()[0]

    def join(self, cpus: int = 1) -> None:
        """Another node, with a folder of its own: what Ray copies there for a job is not what others have."""
        self._folders.append(_short_folder())
        self.run("cluster", "up", "--join", self.address, "--cpus", cpus, "--temp-dir", self._folders[-1])

    def run(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A plaudit command."""
        done = subprocess.run(
            [sys.executable, "-m", "plaudit", *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_S,
            env=self.environment,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, *arguments: object, output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """A plaudit command that is not waited for."""
        with output.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "plaudit", *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env={**self.environment, **environment},
            )  # fmt: skip

    def processes(self, word: str = "") -> list[str]:
        """Those of this cluster whose command line has a word with this beginning."""
        marked = [process for process in psutil.process_iter() if _environment(process).get("STARTED_BY") == self.mark]
        commands = {process.pid: _command(process) for process in marked}
        return [f"{pid} {' '.join(words)}" for pid, words in commands.items() if any(part.startswith(word) for part in words)]

    def ranks(self) -> list[str]:
        """After a moment, in which those that were killed end."""
        deadline = time.monotonic() + 100.0
        while (left := self.processes("rank=")) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def end(self) -> None:
        for line in self.processes():
            pid = int(line.split()[0])
            if pid != os.getpid():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                gone(pid)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def _short_folder() -> str:
    """For Ray's sockets, whose paths have at most 107 characters."""
    return tempfile.mkdtemp(dir="/tmp", prefix="ray_")


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}
