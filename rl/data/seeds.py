"""Seeds for the parts of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed that depends on all of `parts`: equal on every machine, and far apart for near parts."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seeds_of(*parts: int | str, each: Iterable[int]) -> tuple[int, ...]:
    """The seeds of `parts` with one more part: `seed_of(*parts, one)` for each one."""
    common = "/".join(map(str, parts)).encode() + b"/"
    digest, number = hashlib.blake2b, int.from_bytes
    return tuple([number(digest(common + b"%d" % one, digest_size=8).digest(), "big") >> 1 for one in each])
