"""What a key of another system is here: an entry of its table.

    copy("optim.lr")            the value is that of a setting here, as it is or through `values` or `read`
    composed("rewards")         several keys together decide a setting: `plaudit/convert` has the rule
    no_meaning("because …")     nothing here corresponds to it, and nothing is lost
    advice("what to do")        a person has to decide, unless the value switches it off

`default` is what the other system does if the key is not given; it is written into the recipe where it differs from ours.
"""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "unset"})()
"""No default: if the key is not given, nothing is written."""
OFF = (None, False, "", -1, 0, "no", "none", "None")
"""Values that switch a feature off."""


class Unfit(ValueError):
    """A value that has no counterpart here; the message says what to do."""


@dataclass(frozen=True)
class Entry:
    way: Literal["copy", "composed", "no meaning", "advice"]
    to: tuple[str, ...] = ()
    """Settings here that it is, or takes part in: `optim.lr`."""
    text: str = ""
    """Why it has no meaning; what to do; or how the copied value differs."""
    values: Mapping[Any, Any] | None = None
    """Their value → ours; others need a decision."""
    read: Callable[[Any], Any] | None = None
    """Their value → ours; UNSET: it is off, which is what happens here without the setting."""
    default: Any = UNSET
    off: tuple[Any, ...] = OFF
    """advice: values that need no decision."""
    switch: str | None = None
    """advice: needs a decision only if this other key is on."""
    when_off: str = ""
    """advice: why it needs no decision then; default: it is off."""


def copy(*to: str, text: str = "", values: Mapping[Any, Any] | None = None, read: Any = None, default: Any = UNSET) -> Entry:
    return Entry("copy", to, text, values, read, default)


def composed(*to: str, default: Any = UNSET, text: str = "") -> Entry:
    return Entry("composed", to, text, default=default)


def no_meaning(text: str, *to: str) -> Entry:
    return Entry("no meaning", to, text)


def advice(text: str, *to: str, off: tuple[Any, ...] = (), switch: str | None = None) -> Entry:
    return Entry("advice", to, text, off=(*OFF, *off), switch=switch)


def same(text: str, *values: Any, otherwise: str, to: tuple[str, ...] = ()) -> Entry:
    """The key's only values that need no decision are these, which are what happens here anyway."""
    return Entry("advice", to, otherwise, off=values, when_off=text)


def several(entry: Entry, *names: str) -> dict[str, Entry]:
    """The same entry for several keys."""
    return dict.fromkeys(names, entry)


def named(prefix: str, entry: Entry, *names: str) -> dict[str, Entry]:
    """The same entry for several keys of a section."""
    return several(entry, *(f"{prefix}.{name}" for name in names))


@dataclass(frozen=True)
class Table:
    """All keys of a system."""

    name: str
    keys: Mapping[str, Entry]
    """By full name, or by pattern (`*` matches anything); full names come first, then patterns in their order."""
    aliases: Mapping[str, str]
    """Other spellings, of earlier and later versions → the one in `keys`. A name that ends with `.` is a prefix."""

    def canonical(self, key: str) -> str:
        if key in self.aliases:
            return self.aliases[key]
        for other, name in self.aliases.items():
            if other.endswith(".") and key.startswith(other):
                return name + key.removeprefix(other)
        return key

    def find(self, key: str) -> Entry | None:
        """The entry of a key in any spelling."""
        key = self.canonical(key)
        if key in self.keys:
            return self.keys[key]
        return next((entry for pattern, entry in self.keys.items() if "*" in pattern and fnmatch.fnmatchcase(key, pattern)), None)


# Values --------------------------------------------------------------------------------------------------------------


def positive(value: Any) -> Any:
    """−1, 0 and null switch it off."""
    return UNSET if value in (None, "") or (isinstance(value, int | float) and value <= 0) else value


def given(value: Any) -> Any:
    return UNSET if value in (None, "") else value


def file_list(value: Any) -> Any:
    """One file, or a list."""
    if value in (None, "", []):
        return UNSET
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def comma_list(value: Any) -> Any:
    """`a,b` → [a, b]."""
    listed = value if isinstance(value, list) else [name.strip() for name in str(value).split(",") if name.strip()]
    return UNSET if value is None or not listed else listed[0] if len(listed) == 1 else listed


def placement(value: Any) -> str:
    return "offload" if value else "resident"


TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")


def trackers(value: Any) -> Any:
    """Loggers that are trackers here; the terminal needs none."""
    names = [str(name).lower() for name in (value if isinstance(value, list) else str(value).strip("[]").split(","))]
    names = [name.strip(" '\"") for name in names]
    unknown = [name for name in names if name not in (*TRACKERS, "console", "file", "none", "null", "", "all")]
    if unknown:
        raise Unfit(f"{', '.join(unknown)} is not among the trackers ({', '.join(TRACKERS)}): choose one as run.trackers")
    return [name for name in names if name in TRACKERS] or UNSET


# Reasons that several tables give -------------------------------------------------------------------------------------

PACKED = "sequences are always packed without padding"
AUTOMATIC = "it is chosen automatically"
ENGINE = (
    "plaudit samples with its own engine, on the trainer's weights (rollout.engine=vllm or sglang for a server: docs/engine.md)"
)
SHARDED = "cluster.sharding chooses how processes divide a model"
SAVED = "a checkpoint always has all that an exact resume needs"
SAMPLES = "every sample is in the run folder's samples/, with its rewards"
TEXT_ONLY = "plaudit trains on text"
LOGGED = "every step is logged"
QUANTISED = "it is a detail of quantisation, of which model.lora.base_bits is the only setting"
NEVER_PUSHED = "plaudit uploads nothing: upload the run folder's model/ yourself"
PRECISION = (
    "weights are trained in float32 or bfloat16. To save memory: model.lora.rank (QLoRA: model.lora.base_bits), "
    "model.gradient_checkpointing, optim.placement=offload (docs/memory.md)"
)
