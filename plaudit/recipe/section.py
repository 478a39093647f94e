"""What every section of a recipe is, and the kinds of values that several of them take."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails


class Section(BaseModel):
    """Frozen, and closed: a setting it does not know is an error, not a silent nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def idle(self) -> dict[str, str]:
        """Settings that do nothing beside the others, and why. Given all the same, they are an error, unless with null: who sets
        something expects something of it."""
        return {}

    @model_validator(mode="after")
    def _nothing_is_set_in_vain(self) -> Self:
        in_vain = [
            f"{name} {why}{', or' if ': ' in why else ':'} leave it out"
            for name, why in self.idle().items()
            if name in self.model_fields_set and getattr(self, name) is not None
        ]
        if in_vain:
            raise ValueError("; ".join(in_vain) + " (on the command line: NAME=null)")
        return self

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_not_booleans(cls, given: Any) -> Any:
        # pydantic takes `lr: true` for 1.0; nobody means that. (A validator of each field would do, but pydantic allows
        # none on the field that tells the sections of a list apart.)
        wrong = []
        for name, value in given.items() if isinstance(given, dict) else ():
            boolean = next((v for v in (value if isinstance(value, list) else [value]) if isinstance(v, bool)), None)
            if boolean is not None and name in cls.model_fields and bool not in _leaf_types(cls.model_fields[name].annotation):
                reason = {"error": ValueError(f"should not be {str(boolean).lower()}")}
                wrong.append(InitErrorDetails(type="value_error", loc=(name,), input=value, ctx=reason))
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return given


def _leaf_types(annotation: Any) -> set[Any]:
    parts = getattr(annotation, "__args__", None)
    return set().union(*map(_leaf_types, parts)) if parts else {annotation}


def one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def any_number(value: Any) -> Any:
    return () if value is None else one_or_more(value)


def names_a_file(train: tuple[str, ...]) -> tuple[str, ...]:
    if not train:
        raise ValueError("names no file")
    return train


Files = Annotated[tuple[str, ...], BeforeValidator(one_or_more)]
"""A path or a list of paths."""
FilesOrNone = Annotated[tuple[str, ...], BeforeValidator(any_number)]
"""The same, or null for none: `data.val=` takes back what a recipe has."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
