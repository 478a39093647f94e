"""Imports without a search for garbage: off in the block only, and objects are set aside only if something was imported."""

import gc
import sys

import pytest

from plaudit.heavy_imports import heavy_imports


@pytest.fixture(autouse=True)
def _restore():
    yield
    gc.enable()


def test_garbage_is_not_searched_for_meanwhile(tmp_path, monkeypatch):
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
    assert gc.get_freeze_count() == frozen, "what was made since then can still be garbage"
    sys.modules.pop("imported_once")


def test_a_process_without_collection_stays_so():
    gc.disable()
    with pytest.raises(ModuleNotFoundError), heavy_imports():
        import no_such_module  # noqa: F401  # pyright: ignore[reportMissingImports]
    assert not gc.isenabled()
