"""The engine that a recipe names."""

from plaudit.errors import RecipeError
from plaudit.plugins import load_attribute
from plaudit.rollout.engine import Engine, EngineSetup


def build_engine(setup: EngineSetup) -> Engine:
    """The engine that `rollout.engine` names."""
    name = setup.rollout.engine
    if name == "native":
        from plaudit.rollout.native.engine import NativeEngine

        return NativeEngine(
            setup.model, setup.tokenizer, max_sequences=setup.rollout.max_sequences, reserved_bytes=setup.reserved_bytes
        )
    made = load_attribute(name)
    if not (isinstance(made, type) and issubclass(made, Engine)):
        raise RecipeError(f"rollout.engine: {name} is not a subclass of plaudit.rollout.engine.Engine")
    return made(setup)  # pyright: ignore[reportCallIssue] (a user's engine takes its setup)
