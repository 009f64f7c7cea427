"""The numbers of processes of a run by role, and the addresses that a worker gets at its start."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["trainer", "generator", "holder"]
Fault = tuple[str, int]
"""A point of the program, and the step in which a fault is planned at that point."""

INSIDE_REDUCTION = "inside the reduction"
"""A trainer has entered the reduction of the gradients."""

INSIDE_GENERATION = "inside a generation"
"""A generator has drawn the first token of each sample of a unit."""


class Crew(msgspec.Struct, frozen=True, kw_only=True):
    """The number of processes of each role.

    `spares` are trainers that wait for another to die; `replicas` of the holders keep each version of the weights.
    """

    trainers: int = 2
    spares: int = 1
    generators: int = 2
    holders: int = 2
    replicas: int = 2

    def __post_init__(self) -> None:
        for name, least in (("trainers", 1), ("spares", 0), ("generators", 1), ("holders", 1), ("replicas", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.replicas > self.holders:
            raise ValueError(f"{self.holders} holders cannot keep {self.replicas} replicas")


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a run: the driver's control address, the job's name and key, and its register's URL.

    `replicas` holders keep a copy of each of the newest `keep` versions; `faults` may break workers.
    """

    address: str
    job: str
    key: bytes
    register: str
    replicas: int
    keep: int
    faults: tuple[Fault, ...] = ()
