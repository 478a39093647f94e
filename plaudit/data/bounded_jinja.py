"""Jinja templates rendered within bounds of work, memory and output, whatever they do.

A template is a program. jinja's sandbox keeps it from the system around it, but not from looping for years or from writing
`'a' * 10 ** 10`. Here every loop, call, filter, operator and output is charged for, and stops the rendering when it has used up
many times what the longest prompts need:

    work = loop items + 4 · calls (50 of a macro) + entries of lists made + characters made / 64    ≤ MAX_WORK, and MAX_CPU_S
"""

import functools
import operator
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import jinja2
import jinja2.visitor
from jinja2 import nodes
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_WORK, MAX_CPU_S = 2_000_000, 10.0
MAX_SIZE = 20_000_000
"""Characters of a text, or entries of a list, that an expression makes; and characters of the whole output."""
MAX_BITS = 4096
"""Of a whole number."""
MAX_TEMPLATE = 1_000_000
"""Characters of a template."""


class OutOfBounds(jinja2.TemplateError):
    """A template that takes more than any prompt needs."""


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """What a template of a BoundedEnvironment writes. Raises OutOfBounds, or whatever the template raises."""
    try:
        with _Budget():
            return template.render(variables)
    except (OverflowError, MemoryError) as error:
        raise OutOfBounds(str(error) or "no memory") from None


# Budget --------------------------------------------------------------------------------------------------------------

_ACTIVE = threading.local()


class _Budget:
    """What one rendering may still use, for the thread that renders."""

    def __enter__(self) -> None:
        self.work, self.output, self.charges, self.began = 0.0, 0, 0, time.thread_time()
        _ACTIVE.budget = self

    def __exit__(self, *_: object) -> None:
        del _ACTIVE.budget


def _charge(work: float) -> None:
    budget: _Budget = _ACTIVE.budget
    budget.work += work
    budget.charges += 1
    if budget.work > MAX_WORK:
        raise OutOfBounds(f"it does more than {MAX_WORK:,} steps")
    if budget.charges % 16 == 0 and time.thread_time() - budget.began > MAX_CPU_S:
        raise OutOfBounds(f"it computes for more than {MAX_CPU_S:g} s")


def _charge_for(value: Any) -> Any:
    """For a value that was made, which is returned."""
    size = len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0
    _require_size(size)
    _charge(1 + (size / 64 if isinstance(value, str | bytes) else size))
    return value


def _require_size(size: float) -> None:
    if size > MAX_SIZE:
        raise OutOfBounds(f"it makes something of more than {MAX_SIZE:,} characters or entries")


def _written(value: Any) -> int:
    """About how many characters a value has when it is written out, before that is done: lists of the same list twice double with
    every level."""
    if isinstance(value, str):
        return len(value)
    total, pending = 0, [value]
    while pending and total <= MAX_SIZE:
        one = pending.pop()
        if pending:
            _charge(4)
        total += len(one) + 2 if isinstance(one, str) else 8
        if isinstance(one, Mapping):
            pending += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            pending += one
    _require_size(total)
    return total


# Expressions ---------------------------------------------------------------------------------------------------------

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod,
    "**": operator.pow,
}  # fmt: skip


def _require_growth(symbol: str, left: Any, right: Any) -> None:
    """Raise before an operator makes something too large."""
    numbers = isinstance(left, int) and isinstance(right, int)
    if symbol == "**":
        exponent = abs(right) if isinstance(right, int) else 1
        if isinstance(left, int) and left.bit_length() * exponent > MAX_BITS:
            raise OutOfBounds("it computes a power with thousands of digits")
    elif symbol == "*" and numbers:
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise OutOfBounds("it computes a number with thousands of digits")
    elif symbol == "*":
        for times, value in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
                _require_size(times * len(value))
    elif symbol == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        _require_size(len(left) + len(right))
    elif symbol == "%" and isinstance(left, str | bytes):
        _require_format(left if isinstance(left, str) else left.decode("latin-1"), [right])


def _require_format(pattern: str, values: Iterable[Any]) -> None:
    """Of `%` and str.format. Widths come from the pattern; those that come from values are refused."""
    if re.search(r"%[^a-zA-Z%]*\*|:[^{}]*\{|[0-9]{5}", pattern):
        raise OutOfBounds("it formats with a width of its own")
    _require_size(
        len(pattern) + pattern.count("%") * 10_000 + (pattern.count("{") + pattern.count("%")) * sum(map(_written, values))
    )


def _require_arguments(name: str, subject: Any, arguments: Sequence[Any]) -> None:
    """Of a method of a value, or a filter on it: raise before it makes something too large."""
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_SIZE:
            raise OutOfBounds(f"{name} gets the number {argument:.0e}")
    lines = subject.count("\n") + 1 if isinstance(subject, str) else 1
    widths = [argument for argument in arguments if isinstance(argument, int)]
    texts = [argument for argument in arguments if isinstance(argument, str)]
    if name == "replace" and isinstance(subject, str) and len(texts) >= 2:
        _require_size(len(subject) + (subject.count(texts[0]) if texts[0] else len(subject) + 1) * len(texts[1]))
    elif name == "join":
        separator, items = (
            (subject, arguments[0]) if isinstance(subject, str) and arguments else (texts[0] if texts else "", subject)
        )
        if isinstance(items, list | tuple | dict):
            _require_size(sum(map(_written, items)) + len(separator) * len(items))
    elif name in ("indent", "wordwrap", "expandtabs"):
        places = subject.count("\t") if name == "expandtabs" else lines
        _require_size(len(subject) + places * (max(widths, default=8) + sum(map(len, texts))))
    elif name == "format" and isinstance(subject, str):
        _require_format(subject, arguments)
    elif name == "translate" and arguments and isinstance(arguments[0], Mapping):
        _require_size(len(subject) * max((len(v) for v in arguments[0].values() if isinstance(v, str)), default=1))
    elif name in ("tojson", "pprint", "string"):
        _require_size(_written(subject) * (1 + max(widths, default=0)))
    elif name == "sum" and isinstance(subject, list | tuple):
        _require_size(sum(len(one) for one in subject if isinstance(one, Sized)))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passes_first = getattr(function, "jinja_pass_arg", None) is not None

    @functools.wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        subject, *others = arguments[1:] if passes_first else arguments
        if name == "join" and isinstance(subject, Iterator):
            subject = _charge_for(list(_each(subject)))
            arguments = (*arguments[: int(passes_first)], subject, *others)
        _require_arguments(name, subject, [*others, *named.values()])
        result = function(*arguments, **named)
        return _each(result) if isinstance(result, Iterator) else _charge_for(result)

    return bounded


def _each(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _charge(1)
        yield item


def _loop_items(items: Any) -> Any:
    """What a loop iterates over, charged for. Undefined ones have no items."""
    if isinstance(items, Sized):
        _charge(1 + len(items))
        return items
    return _each(items)


def _concatenated(values: list[Any]) -> str:
    _require_size(sum(map(_written, values)))
    return _charge_for("".join(map(str, values)))


@jinja2.pass_context
def _output(_: jinja2.runtime.Context, value: Any) -> Any:
    """Everything written, text of the template included."""
    size = _written(value)
    _ACTIVE.budget.output += size
    _require_size(_ACTIVE.budget.output)
    _charge(1 + size / 64)
    return value


class _ChargedNodes(jinja2.visitor.NodeTransformer):
    """Loops, `~` and plain text, which jinja compiles to code without a hook, become filters and expressions, which have one."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "loop items", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "concatenated", [], [], None, None, lineno=node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates to be rendered with `render`. `finalize`: what is written in place of a value."""

    intercepted_binops = frozenset(_BINARY)

    def __init__(self, *, finalize: Callable[[Any], Any] | None = None, **options: Any) -> None:
        output = _output if finalize is None else jinja2.pass_context(lambda context, value: _output(context, finalize(value)))
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=output, **options)
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {"loop items": _loop_items, "concatenated": _concatenated}
        del self.globals["lipsum"]
        self.globals |= {"dict": _dict, "namespace": _Namespace}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _bounded_filter(name, function)

    def compile_template(self, text: str) -> jinja2.Template:
        if len(text) > MAX_TEMPLATE:
            raise OutOfBounds(f"it has more than {MAX_TEMPLATE:,} characters")
        with _Budget():
            return self.from_string(text)

    def _generate(self, source: nodes.Template, *arguments: Any, **named: Any) -> str:
        return super()._generate(_ChargedNodes().visit(source), *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _require_growth(operator, left, right)
        return _charge_for(_BINARY[operator](left, right))

    def call(self, context: Any, obj: Any, /, *arguments: Any, **named: Any) -> Any:  # pyright: ignore
        _charge(50 if isinstance(obj, LoopContext | Macro) else 4)
        if isinstance(obj, LoopContext):
            arguments = tuple(map(_loop_items, arguments))
        subject = getattr(obj, "__self__", None)
        if isinstance(subject, str | bytes | int | list | tuple | dict):
            arguments = tuple(list(_each(one)) if isinstance(one, Iterator) else one for one in arguments)
            _require_arguments(getattr(obj, "__name__", ""), subject, [*arguments, *named.values()])
        return _charge_for(super().call(context, obj, *arguments, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja's own str.format, which it finds wherever it is accessed."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded(*arguments: Any, **named: Any) -> str:
            _require_format(value.__self__, [*arguments, *named.values()])
            return formatted(*arguments, **named)

        return bounded


class _Namespace(jinja2.utils.Namespace):
    """Without attributes of Python's own."""

    def __init__(*arguments: Any, **named: Any) -> None:  # `self` is a name that a template may use
        self, *given = arguments
        jinja2.utils.Namespace.__init__(self, {_public(name): value for name, value in dict(*given, **named).items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_public(name), value)


def _public(name: Any) -> Any:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")
    return name


def _dict(*arguments: Any, **named: Any) -> dict[Any, Any]:
    """In place of the class, whose attributes lead elsewhere."""
    return dict(*arguments, **named)
