"""Seeds for the parts of a run."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed that depends on all of `parts`: equal on every machine, and far apart for near parts."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
