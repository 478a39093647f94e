"""Seeds from keys: everything random is a function of what it is for, so a resumed run draws what an uninterrupted one draws."""

import hashlib


def stable_seed(*key: int | str, bits: int = 64) -> int:
    """A seed below 2^bits from a key, the same on every machine and Python."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=bits // 8).digest(), "little")
