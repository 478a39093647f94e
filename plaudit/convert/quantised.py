"""QLoRA of other systems: LoRA on a base in 8 or 4 bits, which is model.lora.base_bits here."""

from collections.abc import Mapping
from typing import Any

from plaudit.convert.conversion import DEFAULT, NO_MEANING, Conversion
from plaudit.other_systems.entries import OFF, PRECISION, QUANTISED

BITS, DROPOUT = "model.lora.base_bits", "model.lora.dropout"


def convert_quantised(
    c: Conversion, wanted: Mapping[str, Any], *, lora: bool, dropout: str, kind: str = "", nested: tuple[str, ...] = ()
) -> None:
    """`wanted`: keys, and the bits that each asks for. Keys of: LoRA's `dropout`, the `kind` of 4 bits, `nested` quantisation."""
    bits = next((bits for bits in wanted.values() if bits in (4, 8)), None) if lora else None
    if bits is not None:
        c.set(BITS, bits, *(key for key in wanted if wanted[key] == bits))
        _drop_dropout(c, dropout)
    for key in wanted:
        if c.value(key) in OFF:
            c.no_meaning(f"it is off, as here without {BITS}", key)
        c.needs(PRECISION, key)
    if bits == 4 and c.has(kind):
        if str(c.value(kind)).lower() == "nf4":
            c.line(DEFAULT, kind, f"{BITS}: 4 is NF4")
        c.needs(f"the 4 bits of {BITS} are NF4, which has smaller errors: there is no other kind", kind)
    for key in nested:
        if bits is not None and c.has(key):
            if c.value(key) in OFF:
                c.line(DEFAULT, key, "scales are not quantised")
            c.no_meaning("scales are not quantised: 0.0625 bytes per weight instead of 0.016, and none of that error", key)
    c.no_meaning(QUANTISED, kind, *nested)


def _drop_dropout(c: Conversion, key: str) -> None:
    """LoRA on such a base has none."""
    dropout = c.value(key)
    if dropout not in OFF:
        c.line(NO_MEANING, key, f"{DROPOUT} is 0 instead of {dropout}: {BITS} rules out dropout on adapters")
        c.set(DROPOUT, 0.0)
