"""What a process and its zygote say to each other."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

PACKET = 1 << 16
"""The most bytes in one packet of the zygote's control socket."""


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Fork a process. With it come two descriptors: its end of the channel, and where it writes its output.

    The process will use `threads` torch threads.
    """

    threads: int


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Import these modules, for every later fork to have."""

    modules: tuple[str, ...]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The request before is done. The answer to `Spawn` has the new `pid`, and its pidfd with it."""

    pid: int = 0


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """The request before could not be done."""

    reason: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A process has ended, with this wait status."""

    pid: int
    status: int


@dataclass(frozen=True, slots=True)
class Boot:
    """The first message on a new process's channel: what it is to be."""

    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    directory: str
    target: bytes
    """A cloudpickled callable that is given the channel."""
