"""The four ports of a node: time, links, register and processes. A real and a simulated implementation of each exist.

All calls and callbacks of the ports are made in the one thread of the node, and none of them blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.comms.transport.base import Peer
from holdfast.ft.membership.events import CasFailed, CasLost, CasWon, Death, ViewRead
from holdfast.ft.membership.view import Member, View

Answer = CasWon | CasLost | CasFailed
"""What became of a compare-and-set."""


class Timer(Protocol):
    """A call that is due at a later time."""

    def cancel(self) -> None:
        """Do not make the call."""


class Time(Protocol):
    """The port to time. An asyncio event loop is one; the simulator has its own."""

    def time(self) -> float:
        """The time in seconds, which never goes back."""

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer:
        """Call `callback(*args)` after `delay` seconds, in the thread of the node."""

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> object:
        """Call `callback(*args)` in the thread of the node. RuntimeError once that has ended."""


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
class OpPosition:
    """The number of ops that a process has entered in `epoch`, and whether it is `inside` of the last one."""

    epoch: int
    entered: int
    inside: bool


OnDeaths = Callable[[tuple[Death, ...]], None]


class Watch(Protocol):
    """Watches processes of this host (`ProcessWatch`)."""

    def follow(self, members: Iterable[Member]) -> None: ...

    def close(self) -> None: ...


class Page(Protocol):
    """This process's heartbeat in shared memory (`HeartbeatPage`)."""

    @property
    def number(self) -> int: ...

    def beat(self, now: float, place: OpPosition) -> None: ...

    def close(self) -> None: ...


class PageReader(Protocol):
    """Another process's heartbeat in shared memory (`HeartbeatPageReader`)."""

    def read(self) -> tuple[float, OpPosition] | None: ...

    def close(self) -> None: ...


class Processes(Protocol):
    """The port to the processes of this host: the kernel and its shared memory, or the simulated ones."""

    def watch(self, on_deaths: OnDeaths) -> Watch:
        """A watch that reports the ends of the processes that it follows."""

    def is_gone(self, peer: Peer) -> bool:
        """Whether a process of this host has ended. False for one of another host."""

    def is_stopped(self, pid: int) -> bool:
        """Whether a process is stopped now."""

    def cpu_ticks(self, pid: int) -> int:
        """The processor time that a process has used."""

    def kill(self, peer: Peer) -> None:
        """Send SIGKILL to a process that may have ended already. Raises OSError if it was not sent."""

    def page(self) -> Page:
        """A new heartbeat page for this process."""

    def open_page(self, peer: Peer, number: int) -> PageReader:
        """The page `number` of another process. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Ports:
    """All that a node reaches of the world around it."""

    time: Time
    links: MemberLinks
    register: RegisterPort
    processes: Processes
