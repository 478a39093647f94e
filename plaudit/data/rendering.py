"""Chat templates rendered within bounds (`bounded_jinja.py`): a chat template is a program that comes with a model.

What is rendered is what `tokenizer.apply_chat_template` renders (tests compare them).
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.parser
import numpy as np
from jinja2 import nodes
from transformers import PreTrainedTokenizerBase

from plaudit.data.bounded_jinja import BoundedEnvironment, OutOfBounds, render

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that messages have their thoughts under; templates read the first or the second."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    *,
    generation_prompt: bool = False,
) -> str:
    """The text of a conversation, as `tokenizer.apply_chat_template(…, tokenize=False)` returns it. Raises OutOfBounds, or
    what a template that does not fit the messages raises: TemplateError, TypeError, ValueError or RecursionError."""
    chat = [_with_reasoning(message) for message in _plain(messages)]
    try:
        compiled = _compile(template)
        with_tokens = {"tools": _plain(tools), "documents": None, "add_generation_prompt": generation_prompt}
        return render(compiled, {"messages": chat, **with_tokens, **tokenizer.special_tokens_map})
    except OutOfBounds as error:
        raise OutOfBounds(f"the template of {tokenizer.name_or_path} is out of bounds: {error}") from None
    except (ArithmeticError, LookupError, AttributeError) as error:  # of an expression that does not fit the messages
        raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Made of JSON's types only: other objects have methods that no sandbox knows."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return _plain(value.item()) if isinstance(value, np.generic) else f"<{type(value).__name__}>"


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant writes; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As it is, while jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    environment = BoundedEnvironment(extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.add_filter("tojson", _tojson)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.compile_template(template)
