"""The messages of the harness to a process of the store workload, over their channel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlipBit:
    """A holder flips a bit of the newest version in its memory."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over: the process ends."""
