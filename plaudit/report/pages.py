"""The pages' files (page/): one style sheet and one set of charts for all of plaudit's pages."""

from pathlib import Path

FOLDER = Path(__file__).parent / "page"
MODULES = ("dom.js", "data.js", "charts.js", "runs.js", "step.js", "sample.js", "diagnostics.js", "search.js", "app.js")
"""In the order of their imports, so that they can be joined into one."""
ASSETS = ("style.css", *MODULES)


def read_asset(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def style_sheet() -> str:
    """As an element of a page that is one file."""
    return f"<style>{read_asset('style.css')}</style>"
