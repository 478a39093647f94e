"""Torch's GPU memory in segments that expand: for training processes, not for the servers that they start."""

import os
import subprocess
import sys
import time

import pytest

from plaudit.expandable_segments import SETTING, VARIABLE, segments_expand
from plaudit.servers.process import ServerProcess

OWN = "from plaudit.heavy_imports import set_own_process; set_own_process(); "
SHOW = "import os; from plaudit.expandable_segments import *; use_expandable_segments(); print(os.environ.get(VARIABLE))"


@pytest.mark.parametrize(
    ("first", "variables", "expected"),
    [
        (OWN, {}, SETTING),
        ("", {}, "None"),  # a program that calls plaudit
        (OWN, {VARIABLE: "max_split_size_mb:64"}, "max_split_size_mb:64"),
        (OWN, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "None"),
        (OWN + "import sys; sys.modules['torch'] = None; ", {}, "None"),  # its setting has been read
    ],
)
def test_what_the_user_has_set_up_stays(first, variables, expected):
    clean = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    shown = subprocess.run([sys.executable, "-c", first + SHOW], env=clean | variables, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == expected


def test_both_names_of_the_variable_count(monkeypatch):
    for name in (VARIABLE, "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert not segments_expand()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    assert segments_expand()


@pytest.mark.parametrize("name", [VARIABLE, "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(("value", "expected"), [(SETTING, "unset"), ("max_split_size_mb:64", "max_split_size_mb:64")])
def test_servers_do_not_inherit_it(name, value, expected, tmp_path):
    server = ServerProcess(["sh", "-c", f"echo ${{{name}-unset}}"], tmp_path / "log", {**os.environ, name: value})
    while server.alive:
        time.sleep(0.01)
    assert server.last_line() == expected
    server.stop(1.0)
