"""The launch scripts of the four sources."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def reference_commands(real_data) -> Path:
    """A file for each, with its settings; tests that need them skip without them."""
    folder = real_data.parent / "reference" / "commands"
    if not folder.is_dir():
        pytest.skip(f"needs the launch scripts' settings in {folder}")
    return folder
