"""The engine that a recipe names."""

import inspect

from plaudit.errors import PlauditError, RecipeError
from plaudit.plugins import load_attribute
from plaudit.recipe.rollout import SERVED_ENGINES
from plaudit.rollout.engine import Engine, EngineSetup
from plaudit.rollout.faults import engine_faults


def build_engine(setup: EngineSetup) -> Engine:
    """The engine that `rollout.engine` names."""
    kind = engine_class(setup.rollout.engine)
    if setup.rollout.engine == "native":
        options = {"max_sequences": setup.rollout.max_sequences, "drafts": setup.rollout.drafts}
        options |= {"reserved_bytes": setup.reserved_bytes, "returns_memory": setup.returns_memory}
        return kind(setup.model, setup.tokenizer, **options)  # pyright: ignore
    with engine_faults(kind):
        return kind(setup)  # pyright: ignore[reportCallIssue] (every other engine takes its setup)


def engine_class(reference: str) -> type[Engine]:
    """`native`, `vllm`, `sglang`, or a user's `path/file.py:Class`: a complete subclass of `Engine` that takes an `EngineSetup`."""
    if reference == "native":
        from plaudit.rollout.native.engine import NativeEngine

        return NativeEngine
    if reference in SERVED_ENGINES:
        from plaudit.rollout.served.engine import SERVED

        return SERVED[reference]
    try:
        found = load_attribute(reference)
    except PlauditError as error:
        raise RecipeError(f"rollout.engine: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise RecipeError(f"rollout.engine: {reference} is not a subclass of plaudit.rollout.engine.Engine (docs/engine.md)")
    if missing := ", ".join(sorted(found.__abstractmethods__)):
        raise RecipeError(f"rollout.engine: {reference} does not implement {missing} (docs/engine.md)")
    try:
        inspect.signature(found).bind(object())
    except TypeError:
        raise RecipeError(
            f"rollout.engine: {reference} is built with one argument, {found.__name__}(setup): an EngineSetup"
        ) from None
    return found
