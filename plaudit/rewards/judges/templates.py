"""A judge's prompt: the user's or a built-in Jinja2 template (`prompts/`), rendered for one sample or one group.

A variable that the kind does not provide is an error when the reward is opened, before anything is scored. A value that a row lacks
(its ground truth, a field of extra_info) fails that row's samples. Templates can test for it with `is defined`. Loops and output
have bounds (`plaudit/data/bounded_jinja.py`): no row makes a template compute for ever.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plaudit.data.control_tokens import map_strings
from plaudit.data.conversations import parse_json_messages, parse_messages
from plaudit.errors import DataError, RecipeError, did_you_mean, nearest_path
from plaudit.types import Failure, Prompt

BUILT_IN = Path(__file__).parent / "prompts"
ROW_VARIABLES = frozenset({"prompt", "question", "task", "ground_truth", "extra_info", "data_source"})
"""Variables that every template has."""


class Unrenderable(Exception):
    """The row lacks something the template needs."""

    def __init__(self, failure: Failure):
        super().__init__(failure.message)
        self.failure = failure


class JudgeTemplate:
    """A compiled template. `where` prefixes its error messages."""

    def __init__(self, file: Path, variables: Collection[str], where: str):
        import jinja2.meta

        from plaudit.data.bounded_jinja import BoundedEnvironment, OutOfBounds

        self.file = file
        if not file.is_file():
            problem = "is a folder" if file.is_dir() else f"does not exist.{nearest_path(file)}"
            raise RecipeError(f"{where}: template: {file} {problem}")
        environment = BoundedEnvironment(undefined=jinja2.StrictUndefined, finalize=format_value)
        try:
            text = file.read_text(encoding="utf-8")
            named = jinja2.meta.find_undeclared_variables(environment.parse(text))
            self._template = environment.compile_template(text)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{where}: template: {file} cannot be read: {error}") from None
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(f"{where}: template: {file}:{error.lineno}: {error.message}") from None
        except OutOfBounds as error:
            raise RecipeError(f"{where}: template: {file} is out of bounds: {error}") from None
        known = sorted({*variables, *ROW_VARIABLES})
        unknown = sorted(named - set(known) - set(environment.globals))
        if unknown:
            available = f"Available: {', '.join(known)}.{did_you_mean(unknown[0], known)}"
            raise RecipeError(f"{where}: template: {file} uses {', '.join(unknown)}, which this kind does not provide. {available}")

    def render(self, prompt: Prompt, variables: Mapping[str, Any], quote: Callable[[str], str] | None = None) -> str:
        """The text for this row, with every string of the row and of the responses as `quote` returns it. Raises Unrenderable."""
        import jinja2

        from plaudit.data.bounded_jinja import OutOfBounds, render

        try:
            values = {**_row(prompt), **variables}
            return render(self._template, values if quote is None else map_strings(values, quote))
        except OutOfBounds as error:
            message = f"row {prompt.id}: {self.file.name} is out of bounds: {error}"
            raise Unrenderable(Failure("out_of_bounds", message[:500])) from None
        except jinja2.UndefinedError as error:
            cause = "no_ground_truth" if "ground_truth" in str(error) else "no_field"
            missing = str(error).replace("'dict object' has no attribute", "no field")
            fields = f" (extra_info has: {', '.join(map(str, prompt.extra_info)) or 'nothing'})" if cause == "no_field" else ""
            message = f"row {prompt.id} lacks something {self.file.name} needs: {missing}{fields}"
            raise Unrenderable(Failure(cause, message[:500])) from None
        except Exception as error:  # a filter that does not fit the row's value, or anything else a template may do
            message = f"row {prompt.id}: {self.file.name} cannot be rendered: {type(error).__name__}: {error}"
            raise Unrenderable(Failure("no_field", message[:500])) from None


def quoted_strings(prompt: Prompt, variables: Mapping[str, Any]) -> list[str]:
    """Every string that `render` may quote."""
    found: list[str] = []
    map_strings({**_row(prompt), **variables}, found.append)
    return found


def _row(prompt: Prompt) -> dict[str, Any]:
    variables = {
        "prompt": prompt.messages,
        "question": question_of(prompt),
        "task": task_of(prompt),
        "extra_info": dict(prompt.extra_info),
        "data_source": prompt.data_source,
    }
    return variables if prompt.ground_truth is None else {**variables, "ground_truth": prompt.ground_truth}


def with_prompt_of(prompt: Prompt, column: str) -> Prompt:
    """The row with the messages of this column in place of its own, and without a bare question. Raises Unrenderable."""
    given = given_prompt(prompt, column)
    try:
        messages = parse_messages(parse_json_messages(given), f"row {prompt.id}: column {column}", role="user")
    except DataError as error:
        raise Unrenderable(Failure("no_field", str(error)[:500])) from None
    if not any(str(message["content"]).strip() for message in messages):
        message = f"row {prompt.id}: column {column} is empty, and the reward model's prompt should be there (prompt_column)"
        raise Unrenderable(Failure("no_field", message))
    extra_info = {name: value for name, value in prompt.extra_info.items() if name != "question"}
    return replace(prompt, messages=messages, extra_info=extra_info)


def given_prompt(prompt: Prompt, column: str) -> Any:
    """What the row has in this column, which may be empty. Raises Unrenderable if it has none."""
    if prompt.extra_info.get(column) is None:
        others = ", ".join(map(str, prompt.extra_info)) or "nothing"
        message = f"row {prompt.id} has no column {column}, which prompt_column names (extra_info has: {others})"
        raise Unrenderable(Failure("no_field", message[:500]))
    return prompt.extra_info[column]


def task_of(prompt: Prompt) -> str:
    """The question if that is all there is; else the full conversation with its roles."""
    if _bare_question(prompt) is not None or len(prompt.messages) < 2:
        return question_of(prompt)
    return "\n\n".join(f"[{message.get('role')}]\n{message.get('content')}" for message in prompt.messages)


def _bare_question(prompt: Prompt) -> str | None:
    question = prompt.extra_info.get("question")
    return question if isinstance(question, str) and question.strip() else None


def question_of(prompt: Prompt) -> str:
    """`extra_info.question` if the row has it (the bare question), else the user's last message."""
    if (question := _bare_question(prompt)) is not None:
        return question
    contents = [message.get("content") for message in prompt.messages if message.get("role") == "user"]
    return str(contents[-1] or "") if contents else ""


def format_value(value: Any) -> Any:
    """`from 0 to 10`, not `from 0.0 to 10.0`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
