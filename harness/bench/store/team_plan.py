"""What the workers of a contestant are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TeamPlan:
    """The workers of each contestant: `publishers`, `readers`, `holders` besides them, and threads of torch in each.

    A version has `nbytes` bytes. With `apart`, readers take themselves to be on another host, and all go over TCP.
    """

    publishers: int
    readers: int
    holders: int
    replicas: int
    nbytes: int
    threads: int
    torchstore_source: Path | None
    apart: bool = False
