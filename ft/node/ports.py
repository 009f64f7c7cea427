"""The four ports of a node: time, links, register and processes. A real and a simulated implementation of each exist.

All calls and callbacks of the ports are made in the one thread of the node, and none of them blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from holdfast.ft.detectors.detector import Time
from holdfast.ft.detectors.process_watch import Processes
from holdfast.ft.membership.events import CasFailed, CasLost, CasWon, ViewRead
from holdfast.ft.membership.view import Member, View

Answer = CasWon | CasLost | CasFailed
"""What became of a compare-and-set."""


class MemberLinks(Protocol):
    """The port to other processes (`MemberConnections`). A message may be lost, with its connection or without one.

    The node is told of each new connection (`Node.linked`), of refusals (`Node.refused`) and messages (`Node.hear`).
    """

    def follow(self, at_once: Iterable[Member], later: Iterable[Member]) -> None:
        """Keep connections to exactly these: dial `at_once` now, the others if they do not dial first."""

    def notify(self, member_id: str, method: str, body: bytes) -> bool:
        """Send a message; False if there is no connection."""

    def deliver(self, member: Member, method: str, body: bytes) -> None:
        """Send a message to any process: one that is not followed is dialled for it."""

    def notify_all(self, method: str, body: bytes, but: Collection[str] = ()) -> None:
        """Send a message over every connection, but to those of some ids."""


class RegisterPort(Protocol):
    """The port to the epoch register. `done` is called once with the answer, at once or later; it may never come."""

    @property
    def pushes(self) -> bool:
        """Whether a `watch` costs nothing while nothing happens."""

    def read(self, done: Callable[[ViewRead | None], None]) -> None:
        """Read the newest view, never answering before this returns; None if the register is away."""

    def compare_and_set(self, expected: int, view: View, done: Callable[[Answer], None]) -> None:
        """Replace the view of epoch `expected` (0: none) by `view`."""

    def watch(self, newer_than: int, done: Callable[[ViewRead | None], None]) -> None:
        """Wait for a view newer than `newer_than`; `ViewRead(None)` after a while without one."""


@dataclass(frozen=True, slots=True)
class Ports:
    """All that a node reaches of the world around it."""

    time: Time
    links: MemberLinks
    register: RegisterPort
    processes: Processes
