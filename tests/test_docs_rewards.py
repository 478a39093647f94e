"""The examples of docs/rewards.md: every one runs and pays what it says. Settings and code on the pages about models are read."""

import json
import re

import pytest
import yaml
from conftest import REPOSITORY

from plaudit import plugins
from plaudit.scoring import Scorer

TEXT = (REPOSITORY / "docs/rewards.md").read_text(encoding="utf-8")
JUDGES = (REPOSITORY / "docs/judges.md").read_text(encoding="utf-8")
PAGES = {name: (REPOSITORY / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("host_a_judge", "published_reward_model")}
EXAMPLES = [
    (block["settings"], line)
    for block in re.finditer(r"```yaml\n(?P<settings>\{kind: .*\})\n```\n(?P<lines>(?:    .*\n?)+)", TEXT)
    for line in block["lines"].splitlines()
]


def test_every_rule_has_an_example():
    shown = {yaml.safe_load(settings)["kind"] for settings, _ in EXAMPLES}
    own = {"cascade", "function"}  # have sections of their own
    judges = {kind for kind in plugins.kinds("rewards") if f"| `{kind}` |" in JUDGES}
    assert set(plugins.kinds("rewards")) - own - judges <= shown


@pytest.mark.parametrize(("settings", "line"), EXAMPLES, ids=[line.strip()[:50] for _, line in EXAMPLES])
def test_example(settings, line):
    reward = yaml.safe_load(settings)
    given, _, expected = line[4:].rpartition("      → ")
    response, _, truth = given.partition("      truth ")
    value, malformed = float(re.match(r"-?[\d.]+", expected)[0]), "malformed" in expected  # pyright: ignore
    row = {"prompt": "p", "response": response.replace("⏎", "\n"), "data_source": (reward.get("when") or {}).get("data_source")}
    if truth:
        try:
            row["ground_truth"] = json.loads(truth)
        except ValueError:
            row["ground_truth"] = truth
    if tokens := re.fullmatch(r"(\d+) tokens", response):
        row["tokens"] = int(tokens[1])
    with Scorer([reward | {"weight": 1.0}]) as scorer:
        [scored] = scorer.score([row])
    assert scored["reward"] == pytest.approx(value, abs=5e-5)
    assert scored["malformed"] == malformed


def test_the_notebook_example(capsys):
    code, printed = re.search(r"```python\n(from plaudit\.scoring.*?)```\n    (.*?)\n\n", TEXT, re.S).groups()  # pyright: ignore
    exec(code, {})
    assert capsys.readouterr().out.strip() == printed.strip()


def test_settings_shown_in_recipes_are_settings():
    for block in re.findall(r"```yaml\n(rewards:.*?|- (?:kind:|\{kind:).*?)```", TEXT + JUDGES + "".join(PAGES.values()), re.S):
        given = yaml.safe_load(block)
        rewards = given["rewards"] if isinstance(given, dict) else given
        Scorer(rewards).close()


@pytest.mark.parametrize("page", PAGES)
def test_pages_about_models(page):
    """Every block of YAML is rewards, so the test above reads it; code compiles; what is linked is there."""
    text = PAGES[page]
    assert len(re.findall(r"```yaml\n(?:rewards:|- (?:kind:|\{kind:))", text)) == text.count("```yaml") > 0
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        compile(code, page, "exec")
    for link in re.findall(r"\]\(([\w./]+)\)", text):
        assert (REPOSITORY / "docs" / link).exists(), link
