"""placement: launch. The command that starts vLLM, checked before anything is loaded: a server may take minutes to fail."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from plaudit.redaction import redact

PROBE = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec('vllm') is None else 0)"
"""What a Python that may have vLLM is given: it ends with 3 if it has not."""
PROBE_S = 60.0
NOT_BESIDE_PLAUDIT = (
    "It is not installed beside plaudit: install it in an environment of its own (python -m venv .venv-vllm && .venv-vllm/bin/pip "
    "install vllm) and set {setting} to .venv-vllm/bin/vllm"
)


def vllm_command(program: str | None) -> tuple[str, ...]:
    """The command that starts vLLM: its own, or a Python that has it."""
    words = _words(program)
    name = Path(words[-1]).name
    if name == "vllm":
        words.append("serve")
    elif name.startswith("python"):
        words += ["-m", "vllm.entrypoints.openai.api_server"]
    return tuple(words)


def find_launch_problem(program: str | None, setting: str = "model.program") -> str | None:
    """Why this program, the value of `setting`, cannot start vLLM, with what to do; None if nothing speaks against it."""
    if program is None:
        has_vllm = importlib.util.find_spec("vllm") is not None
        return None if has_vllm else NOT_BESIDE_PLAUDIT.format(setting=setting)
    words = _words(program)
    behind_env = Path(words[0]).name == "env" and not any(word.startswith("PATH=") for word in words)
    for word in {words[0], words[-1]} if behind_env else {words[0]}:
        if shutil.which(word) is None:
            return f"{setting}: there is no command {word}. Set it to a `vllm` command, or to the Python that has vLLM."
    if not Path(words[-1]).name.startswith("python"):
        return None
    try:
        done = subprocess.run([*words, "-c", PROBE], stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return None  # slow, but it may work: the server has a time limit of its own
    except OSError as error:
        return f"{setting}: {program} cannot be run ({error.strerror or error})."
    if done.returncode == 3:
        return f"{setting}: {program} has no vLLM. Install it there: {program} -m pip install vllm"
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return redact(f"{setting}: {program} ends with exit code {done.returncode}{f': {last[0][:200]}' if last else ''}.")
    return None


def _words(program: str | None) -> list[str]:
    return [os.path.expanduser(word) for word in shlex.split(program or "")] or [sys.executable]
