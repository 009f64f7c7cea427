"""What the harness tells a process of the store workload, over the channel between the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spoil:
    """To a holder: flip a bit of the newest version in your memory."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over: leave."""
