"""A finding of `holdfast blame`: one suspect, with its evidence in a sentence."""

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
    """A suspect: `rank` in `communicator` and `epoch`; `to` is the other end if the suspect is a link.

    `score` is the certainty, from 0 to 1. `seconds` is the time that it has cost the other ranks so far.
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
