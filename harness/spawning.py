"""What a process and its zygote say to each other, and how a process ties its life to its parent's."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass

import msgspec

PACKET = 1 << 16
"""The most bytes in one packet of the zygote's control socket."""

_PR_SET_PDEATHSIG = 1


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


class Refused(msgspec.Struct, frozen=True, tag=True):
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


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that forked it ends; end now if it is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def how_it_ended(code: int) -> str:
    """What became of a process, in words; `code` is negative for a signal, as `subprocess` has it."""
    if code >= 0:
        return f"exited with status {code}"
    known = {each.value: each.name for each in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"
