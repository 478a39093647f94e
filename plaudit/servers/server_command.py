"""The command that starts a server program, checked before anything is loaded: a server may take minutes to fail."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from plaudit.redaction import redact

PROBE = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec({package!r}) is None else 0)"
"""What a Python that may have the package is given: it ends with 3 if it has not."""
VERSION_PROBE = "from importlib import metadata; print(metadata.version(metadata.packages_distributions()[{package!r}][0]))"
PROBE_S = 60.0
NOT_BESIDE_PLAUDIT = (
    "It is not installed beside plaudit: install it in an environment of its own (python -m venv .venv-{package} && "
    ".venv-{package}/bin/pip install {package}) and set {setting} to .venv-{package}/bin/{program}"
)
INSIDE = Path(__file__).with_name("inside")
"""Files of plaudit that are loaded in a server's own environment."""
KEY = "PLAUDIT_SERVER_TOKEN"
"""The environment variable by which a server is given the key that its routes need."""


@dataclass(frozen=True)
class ServerCommand:
    """How one kind of server is started."""

    title: str
    """Its name, as its authors write it."""
    package: str
    """The Python package, with a command of the same name."""
    module: str
    """What a Python that has the package runs: `python -m module`."""
    program: str
    """What a message recommends as the setting: in the environment's `bin`."""

    def words(self, program: str | None) -> tuple[str, ...]:
        """The command line, up to the server's own arguments. `program`: the server's own command, or a Python that has it."""
        words = _words(program)
        name = Path(words[-1]).name
        if name == self.package:
            words.append("serve")
        elif name.startswith("python"):
            words += ["-m", self.module]
        return tuple(words)

    def find_version(self, program: str | None) -> str | None:
        """Of the package; None if it cannot be found quickly."""
        words = _words(program)
        if Path(words[-1]).name == self.package:
            command = shutil.which(words[-1])
            words[-1] = str(Path(command or words[-1]).with_name("python"))
        probe = VERSION_PROBE.format(package=self.package)
        try:
            done = subprocess.run([*words, "-c", probe], stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S)
        except (subprocess.TimeoutExpired, OSError):
            return None
        return done.stdout.decode(errors="replace").strip() or None if done.returncode == 0 else None

    def find_problem(self, program: str | None, setting: str = "model.program") -> str | None:
        """Why this program, the value of `setting`, cannot start it, with what to do; None if nothing speaks against it."""
        if program is None:
            found = importlib.util.find_spec(self.package) is not None
            return None if found else NOT_BESIDE_PLAUDIT.format(package=self.package, program=self.program, setting=setting)
        words = _words(program)
        behind_env = Path(words[0]).name == "env" and not any(word.startswith("PATH=") for word in words)
        for word in {words[0], words[-1]} if behind_env else {words[0]}:
            if shutil.which(word) is None:
                return (
                    f"{setting}: there is no command {word}. Set it to a `{self.package}` command, or to the Python that has "
                    f"{self.title}."
                )
        if not Path(words[-1]).name.startswith("python"):
            return None
        probe = PROBE.format(package=self.package)
        try:
            done = subprocess.run([*words, "-c", probe], stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S)
        except subprocess.TimeoutExpired:
            return None  # slow, but it may work: the server has a time limit of its own
        except OSError as error:
            return f"{setting}: {program} cannot be run ({error.strerror or error})."
        if done.returncode == 3:
            return f"{setting}: {program} has no {self.title}. Install it there: {program} -m pip install {self.package}"
        if done.returncode != 0:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return redact(f"{setting}: {program} ends with exit code {done.returncode}{f': {last[0][:200]}' if last else ''}.")
        return None


def _words(program: str | None) -> list[str]:
    return [os.path.expanduser(word) for word in shlex.split(program or "")] or [sys.executable]
