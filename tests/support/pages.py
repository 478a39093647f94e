"""Pages that are one file, and a real browser to open them in: Debian's chromium, driven by playwright."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def embedded_data(file: Path) -> Any:
    """The data of a page that is one file, which loads nothing."""
    page = file.read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"<[^>]*\b(src|href)=(?!\"data:)", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))
    [data] = re.findall(r'<script type="application/json" id="embedded">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


@contextmanager
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def watched_page(browser: Any, **settings: Any) -> Iterator[Any]:
    """A page that may log no error, except with one of its `expected`, and request nothing from another machine."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}} | settings)
    page = context.new_page()
    problems, hosts = [], set()
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda sent: hosts.add(urlparse(sent.url).hostname))
    page.expected = []
    yield page
    context.close()
    assert [problem for problem in problems if not any(part in problem for part in page.expected)] == []
    assert hosts <= {"127.0.0.1", None, ""}


def least_contrast(page: Any, *selectors: str) -> float:
    """Of the text of these elements on the page's background, as WCAG defines it."""
    colour = "(s) => getComputedStyle(document.querySelector(s))"
    found = [page.evaluate(f"(s) => ({colour})(s).color", selector) for selector in selectors]
    found.append(page.evaluate(f"() => ({colour})('body').backgroundColor"))
    *texts, back = [_luminance(*map(int, re.findall(r"\d+", rgb)[:3])) for rgb in found]
    return min((max(text, back) + 0.05) / (min(text, back) + 0.05) for text in texts)


def _luminance(*rgb: int) -> float:
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
