"""Every shell block of README.md and docs/ runs when it is pasted, in order, or says above it why it is not run here.

- A fenced block marked `sh` is run: all blocks of a page in one bash, in a copy of the clone's files.
- A fenced block with a title (```python title="my_reward.py") is a file that the reader saves: it is written when its turn comes.
- A line with `# fails` must fail, every other command must succeed.
- `<!-- not run: REASON -->` right above a block leaves it out, and so does `<!-- run by tests/FILE.py -->`.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from plaudit.servers.process import free_port
from support.paths import REPOSITORY, TESTS

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
CORE = ("docs/serve.md", "docs/tutorials/first_reward.md")
"""Pages whose commands need no torch, so that they take seconds. The others are slow tests."""
PORTS = ("8000", "8321")
# A reader needs longer to type the next command than a server to start.
WAIT_FOR_SERVER = r"\g<0>\nuntil (: < /dev/tcp/127.0.0.1/\1) 2> /dev/null; do sleep 0.1; done"
"""Of servers that pages start. Others may use them on this machine, so each is replaced by a free one."""
WARM = TESTS / "support/warm_plaudit.py"
FENCED = re.compile(r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^(?:\$ )?(?:plaudit|python3?|pip|uv|make|curl|vllm|pytest|export|source|kill) ", re.M)
PLACEHOLDER = re.compile(r"\b(?:R\.yaml|[A-Z]{4,})\b")


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    title: str | None
    note: str | None
    code: str

    @property
    def is_shell(self) -> bool:
        return self.language == "sh"

    @property
    def is_run(self) -> bool:
        return self.note is None and (self.is_shell or self.title is not None)


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for found in FENCED.finditer(text):
        language, _, rest = found["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        note = found["note"] if found["note"] and re.match(r"(not run|run by)\b", found["note"]) else None
        blocks.append(Block(text[: found.start()].count("\n") + 1, language, title and title[1], note, found["code"]))
    return blocks


RUN = [page for page in PAGES if any(block.is_run and block.is_shell for block in blocks_of(page))]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_run_or_says_why_not(page):
    for block in blocks_of(page):
        where = f"{name_of(page)}:{block.line}"
        if block.note is not None:
            assert block.is_shell, f"{where}: only shell blocks are run"
            reason = re.fullmatch(r"not run: \S.+|run by (?P<test>tests/[\w/]+\.py)", block.note)
            assert reason, f"{where}: write `not run: REASON` or `run by tests/FILE.py`"
            assert not reason["test"] or (REPOSITORY / reason["test"]).is_file(), where
        unmarked = block.language in ("bash", "console", "shell", "zsh") or (not block.language and COMMAND.search(block.code))
        assert not unmarked, f"{where}: mark commands with ```sh, so that they are run"
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    for line in re.findall(r"^    (\S.*)$", prose, re.M):
        assert not COMMAND.match(line) or PLACEHOLDER.search(line), f"{name_of(page)}: put this into a ```sh block: {line}"


def script_of(page: Path) -> str:
    lines = ["set -e"]
    for block in blocks_of(page):
        if not block.is_run:
            continue
        if block.title is not None:
            lines.append(f"mkdir -p $(dirname {block.title}) && cat > {block.title} <<'END_OF_FILE'\n{block.code}END_OF_FILE")
        else:
            lines.append(
                re.sub(r"^(.*\S) +# fails\b.*$", r"if \1; then echo 'this should have failed'; exit 1; fi", block.code, flags=re.M)
            )
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def warm_commands(tmp_path_factory) -> Iterator[Path]:
    """A folder with a `plaudit` command for pages that need torch. `serve` is started in the usual way: it gets signals."""
    folder = tmp_path_factory.mktemp("commands")
    short = tempfile.mkdtemp(dir="/tmp")  # a socket's path has at most 104 characters on macOS
    python, server, command = sys.executable, Path(short, "socket"), folder / "plaudit"
    warm, usual = f'exec {python} -I {WARM} {server} "$@"', f'exec {python} -m plaudit "$@"'
    command.write_text(f'#!/bin/sh\nif [ "$1" = serve ]; then {usual}; else {warm}; fi\n')
    command.chmod(0o755)
    with subprocess.Popen([python, WARM, server], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}) as process:
        while not server.exists():
            assert process.poll() is None
            time.sleep(0.1)
        yield folder
        process.kill()
    shutil.rmtree(short)


@pytest.mark.parametrize("page", [page for page in RUN if name_of(page) in CORE], ids=name_of)
def test_commands_run_when_pasted(page, tmp_path):
    paste(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN if name_of(page) not in CORE], ids=name_of)
def test_commands_with_torch_run_when_pasted(page, tmp_path, warm_commands):
    paste(page, tmp_path, warm_commands)


def paste(page: Path, folder: Path, *commands: Path) -> None:
    """Runs a page's blocks in one bash. `commands`: folders whose commands come first."""
    if "curl " in (script := script_of(page)) and shutil.which("curl") is None:
        pytest.skip("needs curl")
    for name in ("recipes", "docs"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("*.png", "__pycache__"))
    for port in PORTS:
        free = str(free_port())
        script = script.replace(port, free)
        for recipe in (folder / "recipes").rglob("*.yaml"):  # which name the server too
            if (address := f"127.0.0.1:{port}") in (text := recipe.read_text(encoding="utf-8")):
                recipe.write_text(text.replace(address, f"127.0.0.1:{free}"), encoding="utf-8")
    script = re.sub(r"^.*--port (\d+).*&$", WAIT_FOR_SERVER, script, flags=re.M)
    (folder / "page.sh").write_text(script)
    search = [*map(str, commands), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(search), "PYTHONPATH": str(REPOSITORY)}
    with (folder / "page.log").open("w+") as log:
        process = subprocess.Popen(
            ["bash", "page.sh"], cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # servers that a page leaves running
        log.seek(0)
        assert process.returncode == 0, f"{name_of(page)}:\n{log.read()[-4000:]}"
