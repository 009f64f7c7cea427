"""The messages between a process and its zygote."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

PACKET = 1 << 16
"""The most bytes in one packet of the zygote's control socket."""


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Fork a process. Two descriptors come along: its end of the channel, and the file for its output.

    The process will use `threads` torch threads.
    """

    threads: int


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Import these modules for all later forks."""

    modules: tuple[str, ...]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The last request is done. The answer to `Spawn` has the new `pid`, and its pidfd along."""

    pid: int = 0


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """The last request could not be done. `threads` names the module that started threads, if one did."""

    reason: str
    threads: str = ""


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A process has ended, with this wait status."""

    pid: int
    status: int


@dataclass(frozen=True, slots=True)
class Boot:
    """The first message on a new process's channel: its environment and its target."""

    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    directory: str
    target: bytes
    """A cloudpickled callable that takes the channel."""
