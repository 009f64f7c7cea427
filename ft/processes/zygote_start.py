"""Starts the process of a zygote, and the messages to it. Imports nothing slow: a command can do it first.

start_early("transformers", ...)     # a command, once it knows that it will need processes
import torch, ...                    # this process imports what it needs, on another core
zygote().spawn(...)                  # the zygote that was started early
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, Any, Protocol

import msgspec

PACKET = 1 << 16
"""The most bytes in one packet of the zygote's control socket."""


ULIMIT = "raise the limit: ulimit -n"


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Fork a process. Two descriptors come along: its end of the channel, and the file for its output.

    The process will use `threads` torch threads. The answer has the `number` of the request.
    """

    threads: int
    number: int = 0


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Import these modules for all later forks. The answer has the `number` of the request."""

    modules: tuple[str, ...]
    number: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A request is done. The answer to `Spawn` has the new `pid`, and its pidfd along."""

    pid: int = 0
    number: int = 0


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """A request could not be done. `threads` names the module that started threads, if one did."""

    reason: str
    threads: str = ""
    number: int = 0


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


class ZygoteProcess(Protocol):
    """The zygote as its parent sees it. `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StartedZygote:
    """A zygote that owes an answer for its own imports, and one more if it was asked for `modules`."""

    process: ZygoteProcess
    control: socket.socket
    log: IO[bytes]
    modules: tuple[str, ...] = ()


def start_zygote(*modules: str) -> StartedZygote:
    """Start a zygote in a new interpreter, which imports `modules` after its own."""
    log = tempfile.TemporaryFile()  # noqa: SIM115
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process: subprocess.Popen[Any] = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.ft.processes.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
    if modules:
        control.sendmsg([msgspec.msgpack.encode(Preload(modules))])
    return StartedZygote(process, control, log, modules)


OPTIMIZERS = "torch._dynamo"
"""What the first optimizer of a process imports: it takes as long as torch itself. For zygotes of ranks that train."""

_early: StartedZygote | None = None


def start_early(*modules: str) -> None:
    """Start the zygote that the next `zygote()` of this process will return, unless there is one already.

    It ends with this process. Children that are forked before `zygote_client` is imported would share it.
    """
    global _early
    client = sys.modules.get("holdfast.ft.processes.zygote_client")  # without it there is none
    if _early is None and (client is None or client.zygote_pid() is None):
        _early = start_zygote(*modules)
        atexit.register(end_untaken)


def take_early() -> StartedZygote | None:
    """The zygote that was started early, once."""
    global _early
    taken, _early = _early, None
    return taken


def early_pid() -> int | None:
    """The process id of a zygote that was started early and not used yet; None if there is none."""
    return None if _early is None else _early.process.pid


def end_untaken() -> None:
    """End a zygote that was never needed. It has no children."""
    if (untaken := take_early()) is not None:
        untaken.process.kill()
        untaken.process.wait(10.0)
        untaken.control.close()
        untaken.log.close()


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends; exit now if `parent` is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
