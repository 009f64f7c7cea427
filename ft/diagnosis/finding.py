"""What blame finds: one suspect each, with the evidence in a sentence."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["crash", "hang", "cut", "mismatch", "slow", "stuck"]

MEANING = {
    "crash": "it died inside the job",
    "hang": "it did not arrive where the others wait",
    "cut": "what it sends does not reach the other",
    "mismatch": "it called something else than the others",
    "slow": "the others wait for it, again and again",
    "stuck": "an op does not end, and nobody says for whom it waits",
}


class Finding(msgspec.Struct, frozen=True):
    """A suspect. `rank` is that in the communicator and epoch named; `to` the other end of a link, if it is one.

    `score` is how sure it is, from 0 to 1. `seconds` is what it has cost the others so far.
    """

    kind: Kind
    rank: int
    score: float
    evidence: str
    communicator: str
    epoch: int
    process: str = ""
    pid: int = 0
    to: int | None = None
    seconds: float = 0.0
