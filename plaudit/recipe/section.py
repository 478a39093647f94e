"""The base class of all recipe sections, and value types that several of them share."""

from typing import Annotated, Any, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from plaudit.redaction import keep_secret, redact


class Section(BaseModel):
    """Frozen and closed: an unknown setting is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def ineffective_settings(self) -> dict[str, str]:
        """Settings that have no effect in combination with the others, each with the reason.

        Setting one of them (other than to null) is an error, because the user expects it to do something.
        """
        return {}

    @model_validator(mode="after")
    def _refuse_ineffective_settings(self) -> Self:
        problems = [
            f"{name} has no effect: {reason}"
            for name, reason in self.ineffective_settings().items()
            if name in self.model_fields_set and getattr(self, name) is not None
        ]
        if problems:
            raise ValueError("; ".join(problems) + ". Remove it (on the command line: NAME=null).")
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_for_numbers(cls, values: Any) -> Any:
        # pydantic reads `lr: true` as 1.0. (A per-field validator is not possible: pydantic allows none on a discriminator.)
        errors = []
        for name, value in values.items() if isinstance(values, dict) else ():
            boolean = next((v for v in (value if isinstance(value, list) else [value]) if isinstance(v, bool)), None)
            if boolean is not None and name in cls.model_fields and bool not in _leaf_types(cls.model_fields[name].annotation):
                reason = {"error": ValueError(f"should not be {str(boolean).lower()}")}
                errors.append(InitErrorDetails(type="value_error", loc=(name,), input=value, ctx=reason))
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return values


def _leaf_types(annotation: Any) -> set[Any]:
    arguments = getattr(annotation, "__args__", None)
    return set().union(*map(_leaf_types, arguments)) if arguments else {annotation}


def one_or_more(value: Any) -> Any:
    """A single string becomes a list."""
    return [value] if isinstance(value, str) else value


def zero_or_more(value: Any) -> Any:
    """As one_or_more; null becomes an empty list."""
    return () if value is None else one_or_more(value)


def strings_or_null(value: Any) -> Any:
    """As one_or_more; null stays null."""
    return None if value is None else one_or_more(value)


def require_files(files: tuple[str, ...]) -> tuple[str, ...]:
    if not files:
        raise ValueError("is empty; name at least one file")
    return files


def _refuse_keys(arguments: tuple[str, ...]) -> tuple[str, ...]:
    if any("--api-key" in argument or "--api_key" in argument for argument in arguments):
        raise ValueError(
            "should not contain a key. A server for sampling gets one of plaudit's; for a judge's, set VLLM_API_KEY in the "
            "environment, which both the server and plaudit read"
        )
    return arguments


ServerArguments = Annotated[tuple[str, ...], BeforeValidator(zero_or_more), AfterValidator(_refuse_keys)]
"""Further arguments of a server's command line."""


def _check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    for url in urls:
        try:
            parts = urlsplit(url)
            fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            parts, fine = urlsplit(""), False
        if not fine:
            raise ValueError(f"{redact(url)} should look like http://127.0.0.1:8000")
        if "@" in parts.netloc or parts.query or parts.fragment:
            plain = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
            raise ValueError(
                f"should have no user, password or query: {plain}. Put a key into an environment variable, and its name into "
                "credential"
            )
    return urls


def _keep_secret(credential: str | None) -> str | None:
    if credential is not None:
        keep_secret(credential)
    return credential


Urls = Annotated[tuple[str, ...], BeforeValidator(zero_or_more), AfterValidator(_check_urls)]
"""Addresses of servers."""
Credential = Annotated[str | None, AfterValidator(_keep_secret)]
"""The name of an environment variable with a secret."""
Files = Annotated[tuple[str, ...], BeforeValidator(one_or_more)]
"""A path or a list of paths."""
OptionalFiles = Annotated[tuple[str, ...], BeforeValidator(zero_or_more)]
"""The same, or null for none: `data.val=` on the command line removes the recipe's."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
