"""The reference pages: from the recipe classes, the kinds of rewards and the command line, as `--explain` and `--help` are."""

import inspect
import re
from collections.abc import Collection, Iterator
from typing import Any, get_args

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.models import ArgumentInfo

from plaudit import explain, plugins
from plaudit.cli import app
from plaudit.command_help import EXAMPLES
from plaudit.config import section_class
from plaudit.recipe import STAGES, RewardSettings
from plaudit.recipe.limits import JudgeLimits, Limits, ModelLimits
from plaudit.recipe.reward_models import JudgeSampling, RewardModel
from plaudit.shipped import FOLDER, first_comment, shipped_recipes

STAGE_TITLES = {
    "sft": "SFT recipes",
    "dpo": "DPO recipes",
    "reward-model": "Reward model recipes",
    "rl": "RL recipes",
    "score": "Score recipes",
}
# Sections that several kinds of rewards have, each shown once.
SHARED_SECTIONS = {
    RewardModel: "`model` of a judge or reward model",
    ModelLimits: "`limits` of a reward model",
    JudgeLimits: "`limits` of a judge",
    JudgeSampling: "`sampling` of a judge",
    Limits: "`limits`",
}
GENERATED = "*Generated from the code: the same text as `{}`.*\n"
TABLE = "| setting | values | default | meaning |\n| --- | --- | --- | --- |\n"


def pages() -> dict[str, str]:
    """The Markdown of every generated page, by its path in docs/."""
    stages = {stage.replace("-", "_"): stage_page(stage) for stage in STAGES}
    generated = {"commands": commands(), "rewards": reward_kinds(), **stages}
    linked = {f"reference/{name}.md": re.sub(r"docs/(\w+\.md)", r"[docs/\1](../\1)", text) for name, text in generated.items()}
    return {"reference/index.md": overview(), **linked, "reference/recipes.md": recipes()}


def overview() -> str:
    rows = [
        ("Commands", "commands.md", "every verb of `plaudit`, with its arguments, options and examples"),
        *((title, f"{stage.replace('-', '_')}.md", f"the settings of `stage: {stage}`") for stage, title in STAGE_TITLES.items()),
        ("Kinds of rewards", "rewards.md", "the settings of an entry of `rewards:`"),
        ("Shipped recipes", "recipes.md", "every recipe that ships with plaudit, in full"),
    ]
    table = "\n".join(f"| [{title}]({page}) | {words} |" for title, page, words in rows)
    return f"# Reference\n\nThese pages are generated from the code when the site is built.\n\n| page | |\n| --- | --- |\n{table}\n"


# Settings ------------------------------------------------------------------------------------------------------------


def stage_page(stage: str) -> str:
    text = f"# {STAGE_TITLES[stage]}\n\n" + GENERATED.format(f"plaudit config R.yaml --explain` for `stage: {stage}")
    if "rewards" in STAGES[stage].model_fields:
        text += "\nThe entries of `rewards` are described in [Kinds of rewards](rewards.md).\n"
    return text + "\n## The recipe\n\n" + "\n".join(sections(STAGES[stage], ""))


def sections(kind: type[BaseModel], name: str, skip: Collection[str] = (), shared: dict[Any, str] | None = None) -> Iterator[str]:
    """A table of a section's settings, then each section in it under its dotted name. `shared`: sections that have a heading
    elsewhere on the page."""
    inner: list[tuple[str, type[BaseModel]]] = []
    rows = []
    for setting, info in kind.model_fields.items():
        if setting in skip:
            continue
        values = cell(explain.allowed_values(info.annotation, info.metadata))
        section = _section_of(info.annotation)
        if section not in (None, RewardSettings):
            full = f"{name}.{setting}" if name else setting
            heading = (shared or {}).get(section)
            if heading is None:
                inner.append((full, section))
            values = f"[{values}](#{anchor(heading or full)})"
        rows.append(f"| `{setting}` | {values} | {default(info)} | {cell(info.description or '')} |")
    if rows:
        yield TABLE + "\n".join(rows) + "\n"
    for full, section in inner:
        yield f"{'##' if '.' not in full else '###'} `{full}`\n"
        yield from sections(section, full, shared=shared)


def _section_of(annotation: Any) -> Any:
    """The section class of a setting, or of the entries of its list."""
    return section_class(annotation) or next((found for one in get_args(annotation) if (found := section_class(one))), None)


def default(info: Any) -> str:
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return "" if isinstance(value, BaseModel) else f"`{explain.one_line(value)}`"


def cell(text: str) -> str:
    """Text for a table: pipes would end the cell, and angle brackets outside of code would be HTML."""
    return re.sub(r"(`[^`]*`)|<", lambda found: found[1] or "&lt;", " ".join(text.split())).replace("|", "\\|")


def anchor(heading: str) -> str:
    """As GitHub and the site make it from a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# Rewards -------------------------------------------------------------------------------------------------------------


def reward_kinds() -> str:
    kinds = {kind: plugins.kind("rewards", kind) for kind in plugins.kinds("rewards")}
    meanings = {kind: cell(settings.model_fields["kind"].description or "") for kind, settings in kinds.items()}
    common = [name for name in RewardSettings.model_fields if name != "limits"]
    lines = [
        "# Kinds of rewards\n",
        GENERATED.format("plaudit config R.yaml --explain rewards.KIND"),
        "How they work, with examples: [Rewards](../rewards.md), [Reward models and judges](../reward_models/README.md).\n",
        "| kind | |\n| --- | --- |",
        *(f"| [`{kind}`](#{anchor(kind)}) | {meaning} |" for kind, meaning in meanings.items()),
        "\n## Settings of every reward\n",
        *sections(RewardSettings, "", shared=SHARED_SECTIONS),
    ]
    for section, heading in SHARED_SECTIONS.items():
        lines += [f"## {heading}\n", *sections(section, "")]
    for kind, settings in kinds.items():
        plain = settings.model_fields["limits"].annotation is Limits
        own = list(sections(settings, kind, [*common, "limits"] if plain else common, SHARED_SECTIONS))
        lines += [f"## `{kind}`\n", f"{meanings[kind]}\n", *(own or ["It has only the settings of every reward.\n"])]
    return "\n".join(lines)


# Commands ------------------------------------------------------------------------------------------------------------


def commands() -> str:
    lines = ["# Commands\n", GENERATED.format("plaudit VERB --help")]
    for name, verb in _verbs(app, ""):
        parameters = [(parameter, *get_args(parameter.annotation)) for parameter in inspect.signature(verb).parameters.values()]
        arguments = [info.metavar or parameter.name.upper() for parameter, _, info in parameters if _is_argument(info)]
        lines += [
            f"## plaudit {name}\n",
            inspect.getdoc(verb) or "",
            f"\n    plaudit {' '.join([name, *arguments, '[options]'])}\n",
        ]
        lines += ["| | values | default | meaning |\n| --- | --- | --- | --- |"]
        lines += [_parameter(*one) for one in parameters]
        lines += ["\n```sh", *EXAMPLES[name], "```\n"]
    return "\n".join(lines)


def _verbs(group: typer.Typer, prefix: str) -> Iterator[tuple[str, Any]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{prefix}{command.name or command.callback.__name__}", command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _verbs(inner.typer_instance, f"{prefix}{inner.name} ")


def _is_argument(info: Any) -> bool:
    return isinstance(info, ArgumentInfo)


def _parameter(parameter: inspect.Parameter, kind: Any, info: Any) -> str:
    """A row of a table: what to write, which values it takes, its default, and what it means."""
    name = info.metavar or parameter.name.upper()
    if not _is_argument(info):
        # Inside of Annotated, the first name is where a default would be.
        given = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
        name = ", ".join(given or [f"--{parameter.name.replace('_', '-')}"])
    bounds = [f"{sign} {bound:g}" for sign, bound in (("≥", info.min), ("≤", info.max)) if bound is not None]
    values = "" if kind is bool else f"{explain.allowed_values(kind).removesuffix(' | null')} {' and '.join(bounds)}".strip()
    value = parameter.default
    shown = "required" if value is parameter.empty else "" if value in (None, "", False) else f"`{value}`"
    return f"| `{cell(name)}` | {cell(values)} | {shown} | {cell(info.help or '')} |"


# Recipes -------------------------------------------------------------------------------------------------------------


def recipes() -> str:
    lines = [
        "# Shipped recipes\n",
        "Commands accept these names in any folder; `plaudit recipes NAME` copies a folder of them, to edit.\n",
    ]
    folder = ""
    for name, file in shipped_recipes().items():
        if (here := f"recipes/{file.relative_to(FOLDER).parts[0]}") != folder:
            lines.append(f"## {here}\n")
            folder = here
        lines += [f"### {name}\n", f"{first_comment(file)}.\n", "```yaml", file.read_text(encoding="utf-8").rstrip(), "```\n"]
    return "\n".join(lines)
