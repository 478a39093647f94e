"""The pages of the site: all of them in its navigation, messages and names as the code has them, a complete reference.

`make docs` builds it, with every link checked.
"""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from plaudit import plugins
from plaudit.command_help import EXAMPLES
from plaudit.config import settings_of
from plaudit.other_systems.lookup import counterparts, find_entries
from plaudit.recipe import STAGES
from support.paths import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """docs/generator/reference.py."""
    spec = importlib.util.spec_from_file_location("reference", DOCS / "generator/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once(reference):
    listed = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted([*map(name_of, PAGES), *reference.pages()])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_starts_with_its_only_title(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^# (.*)$", text, re.M)
    assert text.startswith("# ")
    assert len(titles) == 1
    assert len(titles[0]) <= 45, "the navigation shows it"


# The reference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_the_reference_has_every_setting(stage, reference):
    text = reference.pages()[f"reference/{stage.replace('-', '_')}.md"]
    names = {place[-1] for place in settings_of({}, STAGES[stage]) if isinstance(place[-1], str)}
    assert {name for name in names if f"| `{name}` |" not in text} == set()


def test_the_reference_has_every_command_and_kind_of_reward(reference):
    pages = reference.pages()
    assert set(re.findall(r"^## plaudit (.*)$", pages["reference/commands.md"], re.M)) == set(EXAMPLES)
    kinds = plugins.kinds("rewards")
    assert [heading for heading in re.findall(r"^## `(\w+)`$", pages["reference/rewards.md"], re.M) if heading in kinds] == list(
        kinds
    )
    for kind in kinds:
        section = pages["reference/rewards.md"].partition(f"\n## `{kind}`\n")[2].partition("\n## ")[0]
        own = set(plugins.kind("rewards", kind).model_fields) - set(reference.RewardSettings.model_fields)
        assert all(f"| `{name}` |" in section for name in own), kind


# Messages and names --------------------------------------------------------------------------------------------------


def test_messages_in_troubleshooting_are_the_codes():
    """The text of each message, apart from names and numbers (…), occurs in the code."""
    code = "".join(file.read_text(encoding="utf-8") for file in sorted((REPOSITORY / "plaudit").rglob("*.py")))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # strings that span lines
    code = re.sub(r"\{[^{}]*\}", "…", code) + (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = [
        double or single
        for row in re.findall(r"^\| (.*?) \| ", text, re.M)
        for double, single in re.findall(r"``(.+?)``|`([^`]+)`", row)
        if " " in (double or single)
    ]
    pieces = [piece.strip(" ()?:;,'") for message in messages for piece in message.split("…")]
    assert len(messages) > 40
    assert [piece for piece in pieces if len(piece) > 6 and piece not in code] == []


@pytest.mark.parametrize("page", ["from_trl", "from_verl"])
def test_names_of_other_trainers_are_those_of_the_hints(page):
    """A name in the table of a tutorial that plaudit also answers with a hint: both name the same setting."""
    table = (DOCS / f"tutorials/{page}.md").read_text(encoding="utf-8").partition("## Settings\n")[2].partition("\n## ")[0]
    known = {".".join(map(str, place)) for place in settings_of({}, STAGES["rl"])}
    for row in table.splitlines()[2:]:
        theirs, ours = (re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[1:3])
        assert all(name in known for name in ours), row
        for name in theirs:
            hint = counterparts(find_entries(name))
            if hint and "…" not in row.split("|")[2]:  # "rollout.temperature, …" stands for several
                assert set(ours) & set(hint), (row, hint)


def test_the_site_loads_nothing_from_elsewhere():
    settings = yaml.load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    assert settings["theme"]["font"] == "false"
    assert "repo_url" not in settings
