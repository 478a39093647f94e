"""Paths that tests use."""

from pathlib import Path

TESTS = Path(__file__).parent.parent
REPOSITORY = TESTS.parent
CHAT_TEMPLATES = TESTS / "support/chat_templates"
REFERENCE = TESTS / "support/reference"
"""Reference values from other systems."""
