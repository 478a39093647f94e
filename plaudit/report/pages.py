"""The pages' files (page/): one style sheet and one set of charts for all of plaudit's pages."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from plaudit.errors import PlauditError

FOLDER = Path(__file__).parent / "page"
# In the order of their imports, so that they can be joined into one.
VIEWER = ("dom.js", "data.js", "charts.js", "runs.js", "step.js", "sample.js", "diagnostics.js", "search.js", "app.js")
AUDIT = ("dom.js", "charts.js", "audit.js")
DOCTOR = ("dom.js", "charts.js", "doctor.js")
ASSETS = ("style.css", *VIEWER)
"""What a server sends besides the page itself."""
IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)


def read_asset(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def require_folder(option: str, file: Path) -> None:
    """Before the work, so that an error costs nothing."""
    if not file.parent.is_dir():
        raise PlauditError(f"{option}: there is no folder {file.parent}; create it, or name a file in one that exists")
    if file.is_dir():
        raise PlauditError(f"{option}: {file} is a folder; name a file in it, such as {file / 'page.html'}")


def draw_file(title: str, modules: Sequence[str], data: Any) -> str:
    """A page that is one file: its style, its modules joined into one, and its data. Nothing else may run or be loaded."""
    script = "\n".join(EXPORT.sub("", IMPORT.sub("", read_asset(name))) for name in modules)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    # `</script` would end the data, wherever it stands.
    text = json.dumps(data, allow_nan=False, default=str, separators=(",", ":")).replace("<", r"\u003c")
    embedded = f'<script type="application/json" id="embedded">{text}</script>'
    parts = {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "<title>plaudit view</title>": f"<title>{escape(title)}</title>",
        '<link rel="stylesheet" href="page/style.css">': f"<style>{read_asset('style.css')}</style>",
        "This page needs JavaScript, which is served by this machine itself.": "This page needs JavaScript, which is in this file.",
        '<script type="module" src="page/app.js"></script>': f'{embedded}\n<script type="module">{script}</script>',
    }
    page = read_asset("index.html")
    for old, new in parts.items():
        assert old in page, old
        page = page.replace(old, new)
    return page
