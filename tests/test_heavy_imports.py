"""Imports without a search for garbage: off in the block only. Objects are set aside only in plaudit's own processes, and only if
something was imported."""

import gc
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from plaudit import heavy_imports as module
from plaudit.heavy_imports import heavy_imports, set_own_process
from support.recipes import sft_recipe


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    monkeypatch.setattr(module, "_in_own_process", False)
    yield
    gc.enable()


def test_garbage_is_not_searched_for_meanwhile(tmp_path, monkeypatch):
    set_own_process()
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imported_once.py").write_text("import gc\nsearched = gc.isenabled()\n")
    frozen = gc.get_freeze_count()
    with heavy_imports():
        import imported_once  # pyright: ignore[reportMissingImports]
    assert not imported_once.searched
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen
    frozen = gc.get_freeze_count()
    with heavy_imports():
        import imported_once  # pyright: ignore[reportMissingImports]
    assert gc.get_freeze_count() <= frozen, "what was made since then can still be garbage"
    sys.modules.pop("imported_once")


def test_a_process_without_collection_stays_so():
    gc.disable()
    with pytest.raises(ModuleNotFoundError), heavy_imports():
        import no_such_module  # noqa: F401  # pyright: ignore[reportMissingImports]
    assert not gc.isenabled()


CALL = """
import gc, json, sys, weakref
import plaudit

class Trainer:
    pass

trainer = Trainer()
trainer.callback = [trainer]
freed = weakref.ref(trainer)
plaudit.sft(**json.loads(sys.argv[1]))
assert "torch" in sys.modules and gc.isenabled()
del trainer
gc.collect()
print("freed" if freed() is None else "kept")
"""


@pytest.mark.slow
def test_what_a_program_had_before_it_called_plaudit_can_be_freed(tiny_model, rows_file, tmp_path):
    recipe = sft_recipe(tiny_model, rows_file, tmp_path / "run", run={"max_steps": 1})
    done = subprocess.run([sys.executable, "-c", CALL, json.dumps(recipe)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["freed"]), done.stderr


@pytest.mark.parametrize("start", ["plaudit.cli", "plaudit.cluster.rank"])
def test_own_processes_set_imports_aside(start, monkeypatch):
    """The command, and the ranks it starts."""

    class Started(Exception):
        pass

    def fail(*_):
        raise Started

    monkeypatch.setattr("plaudit.cli.require_supported_system", fail)
    monkeypatch.setattr("plaudit.cluster.rank.os", SimpleNamespace(fdopen=fail, dup=fail))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(Started):
        sys.modules[start].main()
    assert module._in_own_process
