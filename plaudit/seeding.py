"""Seeds derived from keys: each random draw depends only on its purpose, so a resumed run draws what an uninterrupted one does."""

import hashlib


def stable_seed(*key: int | str, bits: int = 64) -> int:
    """A seed below 2^bits from a key; the same on every machine and Python version."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=bits // 8).digest(), "little")
