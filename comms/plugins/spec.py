"""The plugin API: the hooks that a package implements under the entry-point group `holdfast`, and their types.

A plugin is a module (or object) with any of the hooks below, marked with `@hookimpl`. `holdfast.comms.plugins.registry`
loads and checks plugins. `refused` probes what a backend needs of the kernel.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pluggy
import torch

from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS
from holdfast.comms.errors import HoldfastError
from holdfast.comms.ops import OPS, ReduceOp
from holdfast.comms.plugins.hints import Hint
from holdfast.comms.tensors.packing import names
from holdfast.comms.transport.base import Context, Link, Transport

if TYPE_CHECKING:
    from holdfast.comms.memory_plane import MemoryPlane

API_VERSION = (1, 1)
"""The version of this plugin API. A plugin built for (major, minor) loads if major is equal and minor not newer.

1.1 added `auto`, `links` and `hints` of `BackendInfo`, `links` and `hints` of `Context`, and `medium` and
`op_hints` of `Transport`, all with defaults.
"""

hookspec = pluggy.HookspecMarker("holdfast")
hookimpl = pluggy.HookimplMarker("holdfast")


@dataclass(frozen=True, slots=True)
class Available:
    """The backend can run here; `detail` says with which library version or device."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The backend cannot run here, for `reason`; `install_hint` says what to install.

    `needs_launcher`: it could run in processes that its launcher (`Capabilities.launcher`) starts.
    """

    reason: str
    install_hint: str = ""
    needs_launcher: bool = False


COLLECTIVES = frozenset([*OPS, "send", "recv"])


_EIGHT_BIT_FLOATS = names(EIGHT_BIT_FLOATS)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. `reduces` and `moves` are the dtypes that it does (torch names, by device type).

    `launcher` names the program that must start the ranks together ("mpirun"); "" if they can be started in any way.
    `passive_target` says what the target of one-sided access (windows, memory plane) must do: "none" (it may compute,
    sleep or be stopped), "thread" (a thread of the backend answers: it may compute or sleep, but not be stopped), or ""
    without one-sided access. `tcp` says when all bytes between processes of one host go over TCP, where a proxy can
    delay, cut or corrupt them: "always", "" (never), or the environment variable that turns it on with the value
    "tcp,self" ("UCX_TLS"). A `peerless` backend has no other ranks: it connects alone, moves nothing, is only taken by
    its name, and the conformance kit does not apply.
    """

    reduces: Mapping[str, frozenset[str]] = field(default_factory=dict)
    moves: Mapping[str, frozenset[str]] = field(default_factory=dict)
    collectives: frozenset[str] = COLLECTIVES
    one_host: bool = False
    one_process: bool = False
    windows: bool = False
    atomics: bool = False
    memory_plane: bool = False
    passive_target: str = ""
    abortable: bool = True
    finds_failures: bool = True
    launcher: str = ""
    tcp: str = ""
    peerless: bool = False

    def widens(self, device: str) -> frozenset[str]:
        """The dtypes that the communicator reduces as float32 and rounds back, since the backend does not."""
        reduces = self.reduces.get(device, frozenset())
        return _EIGHT_BIT_FLOATS - reduces if "float32" in reduces else frozenset()


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend as its plugin announces it. `probe`, `connect` and `memory` import lazily what they need.

    `connect` is None for a backend that has only a memory plane; `memory` is None for one that has none. `prepare`, if
    there is one, is called in every process that joins a job, a spare too, before it has a rank; it returns at once.

    `auto` says what "auto" may take it for, and with which priority: the highest wins. The keys are device types
    ("cpu") for communicators, and "memory" for planes. Without one, a communicator takes it by name alone, and a plane
    takes it last. `links` are the costs by which its collectives are chosen, until they are measured; `hints` are what
    users may set.
    """

    name: str
    api: tuple[int, int]
    description: str
    capabilities: Capabilities
    probe: Callable[[], Available | Unavailable]
    connect: Callable[[Context], Transport] | None
    memory: Callable[[], MemoryPlane] | None = None
    prepare: Callable[[], None] | None = None
    auto: Mapping[str, int] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    hints: tuple[Hint, ...] = ()


@dataclass(frozen=True, slots=True)
class DetectorInfo:
    """A failure detector as its plugin announces it. `probe` and `make` import lazily what they need.

    `evidence`: "proof" if its reports are certain, "suspicion" if other members have to agree. `make` takes a
    `holdfast.ft.detectors.detector.DetectorContext`, in the event loop of a process's runtime, and returns a
    `Detector`.
    """

    name: str
    api: tuple[int, int]
    description: str
    evidence: Literal["proof", "suspicion"]
    probe: Callable[[], Available | Unavailable]
    make: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One op as hooks see it. `nbytes` counts this rank's input; `seconds` and `error` are set in `after_op`.

    `inputs` are the tensors that the op reads on this rank, `outputs` those that it writes: in place, a tensor is in
    both. `root` is the rank that the op is from or to, or the other side of a message; -1 if there is none.
    """

    communicator: str
    epoch: int
    rank: int
    seq: int
    op: str
    nbytes: int
    seconds: float = 0.0
    error: BaseException | None = None
    inputs: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    root: int = -1
    reduction: ReduceOp | None = None
    async_op: bool = False


@dataclass(frozen=True, slots=True)
class AbortEvent:
    """The end of a communicator as hooks see it: `error` is what all later ops raise."""

    communicator: str
    epoch: int
    rank: int
    error: BaseException


class HoldfastSpec:
    """The hooks that a plugin may implement."""

    @hookspec
    def holdfast_backends(self) -> list[BackendInfo]:
        """The backends of this plugin."""
        raise NotImplementedError

    @hookspec
    def holdfast_registers(self) -> Mapping[str, Callable[[str, str], Any]]:
        """URL scheme -> factory(url, cell_name) of a `holdfast.ft.registers.Cell`.

        `holdfast backends` shows the factory's docstring, one line that says what the register is.
        """
        raise NotImplementedError

    @hookspec
    def holdfast_detectors(self) -> list[DetectorInfo]:
        """The failure detectors of this plugin."""
        raise NotImplementedError

    @hookspec
    def holdfast_faults(self) -> Mapping[str, Callable[..., Any]]:
        """Name -> fault type for `holdfast chaos`: a subclass of `holdfast.harness.chaos.FaultType`."""
        raise NotImplementedError

    @hookspec
    def before_op(self, event: OpEvent) -> None:
        """An op of any communicator of this process is issued. See `holdfast.comms.hooks`."""

    @hookspec
    def after_op(self, event: OpEvent) -> None:
        """An op ended on this rank, with or without an error."""

    @hookspec
    def on_abort(self, event: AbortEvent) -> None:
        """A communicator ended: by `abort`, by a failed op, or by `close` with ops that had not ended."""


def _pidfd_send_signal() -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)


_CALLS: dict[str, tuple[Callable[[], None], str]] = {
    "memfd_create": (lambda: os.close(os.memfd_create("holdfast-probe", os.MFD_CLOEXEC)), "Linux 3.17"),
    "pidfd_open": (lambda: os.close(os.pidfd_open(os.getpid())), "Linux 5.3"),
    "pidfd_send_signal": (_pidfd_send_signal, "Linux 5.1"),
}


class CallRefused(HoldfastError):
    """The kernel refuses a call to this process without which it cannot go on; the message says what to allow."""


def require(what: str, *names: str) -> None:
    """Raise `CallRefused` if one of these calls, which `what` needs, fails here."""
    if (wrong := refused(*names)) is not None:
        raise CallRefused(f"{what} cannot be done here: {wrong.reason}; {wrong.install_hint}")


def refused(*names: str) -> Unavailable | None:
    """Why the first of these calls that fails here does, and what to allow; None if all work."""
    for name in names:
        call, since = _CALLS[name]
        try:
            call()
        except AttributeError:
            return Unavailable(f"this Python has no {name}", f"it needs {since}")
        except OSError as error:
            hint = f"it needs {since} and, in a container, a seccomp profile that allows {name}"
            return Unavailable(f"{name} fails: {error.strerror}", hint)
    return None
