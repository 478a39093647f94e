"""The pages of `plaudit doctor --html` and `plaudit audit` in a real browser."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import HOSTILE, chromium, embedded_data, least_contrast, watched_page
from support.paths import REPOSITORY
from support.recipes import rl_recipe, sft_recipe, write_recipe
from support.rows import arithmetic_rows, prompt_rows, write_jsonl

pytestmark = pytest.mark.slow
PAGES = ["doctor", "sft", "audit"]


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory, tiny_model, reward_file) -> dict[str, Path]:
    """Of a folder whose name and of rows whose texts are hostile."""
    folder = tmp_path_factory.mktemp("pages") / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    prompts, rows = prompt_rows(), arithmetic_rows()
    prompts[0]["prompt"][-1]["content"] = rows[0]["messages"][0]["content"] = f"{HOSTILE}\u202e"
    rollouts = [
        {"prompt": f"{HOSTILE} {i} + 1?", "ground_truth": str(i + 1), "response": text, "label": text == str(i + 1)}
        for i in range(10, 20)
        for text in (str(i + 1), f"{HOSTILE} no idea")
    ]
    rl = rl_recipe(
        tiny_model, write_jsonl(folder / "prompts.jsonl", prompts), folder / "rl", reward_file, data={"max_prompt_tokens": 200}
    )
    sft = sft_recipe(tiny_model, write_jsonl(folder / "rows.jsonl", rows), folder / "sft")
    broken = REPOSITORY / "recipes/audit/any_number.py"
    rules = {"stage": "score", "rewards": [{"kind": "function", "path": str(broken)}, {"kind": "exact", "weight": 0.5}]}
    run("doctor", write_recipe(folder / "rl.yaml", rl), "cluster.gpus=2", "--gpu-memory", "1", "--html", folder / "doctor.html")
    run("doctor", write_recipe(folder / "sft.yaml", sft), "--html", folder / "sft.html")
    run("audit", write_recipe(folder / "rules.yaml", rules), write_jsonl(folder / "rollouts.jsonl", rollouts), "--out", folder)
    return {name: folder / f"{name}.html" for name in PAGES}


def run(*arguments: object) -> None:
    done = subprocess.run([sys.executable, "-m", "plaudit", *map(str, arguments)], capture_output=True, text=True, env=os.environ)
    assert done.returncode in (0, 1), done.stdout + done.stderr


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_by_itself(browser, pages, name, width, scheme):
    with watched_page(browser, viewport={"width": width, "height": 844}, color_scheme=scheme) as page:
        page.goto(pages[name].as_uri())
        page.get_by_role("heading", level=1).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert least_contrast(page, "body", ".dim", ".good") >= 4.5  # WCAG AA
        assert page.locator("svg rect").count() > 1
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script").count() == 0


def test_the_doctors_page_shows_all_that_was_found(browser, pages):
    found = embedded_data(pages["doctor"])
    with watched_page(browser) as page:
        page.goto(pages["doctor"].as_uri())
        lines = [" ".join(line.split()) for line in page.locator(".finding").all_inner_texts()]
        words = {"✓": "fine", "!": "warning", "✗": "will fail"}
        expected = (f"{one['mark']} {words[one['mark']]} {one['check']} {one['text']}" for one in found["findings"])
        assert lines == [" ".join(line.split()) for line in expected]
        text = page.locator("main").inner_text()
        for need in found["memory"][0]["needs"]:
            assert need["name"] in text
        assert f"{HOSTILE}⟨U+202E⟩" in text  # the first prompt
        assert "<img src=x onerror=alert(1)>" in page.locator("h1").inner_text()
        # As long as its share of what the device has, 1 GB.
        bar = page.locator(".limited").nth(2).locator(".stack i")
        drawn = sum(bar.nth(i).bounding_box()["width"] for i in range(bar.count()))
        lane = page.locator(".limited").nth(2).locator(".lane").bounding_box()
        limit = page.locator(".limited").nth(2).locator(".limit").bounding_box()["x"] - lane["x"]
        assert drawn / limit == pytest.approx(found["memory"][0]["totals"][2] / 1e9, rel=0.03)


def test_the_audits_page_unfolds_its_examples(browser, pages):
    with watched_page(browser) as page:
        page.goto(pages["audit"].as_uri())
        assert "✗ failed" in page.locator("h1").inner_text()
        page.locator("details summary").first.click()
        assert HOSTILE in page.locator("details[open]").inner_text()
