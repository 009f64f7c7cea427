"""The plugin API: what a package offers under the entry-point group `holdfast`, and how to say so.

A plugin is a module (or object) with any of the hooks below, marked with `@hookimpl`. This file only specifies;
`holdfast.comms.plugins.registry` loads, checks and looks up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS
from holdfast.comms.tensors.packing import names
from holdfast.comms.transport.base import Context, Transport

if TYPE_CHECKING:
    from holdfast.comms.memory_plane import MemoryPlane

API_VERSION = (1, 0)
"""The version of this plugin API. A plugin built for (major, minor) loads if major is equal and minor not newer."""

hookspec = pluggy.HookspecMarker("holdfast")
hookimpl = pluggy.HookimplMarker("holdfast")


@dataclass(frozen=True, slots=True)
class Available:
    """The backend can run here; `detail` says with what (a library version, a device)."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The backend cannot run here, why, and what to install.

    `needs_launcher`: it could, in processes that its launcher (`Capabilities.launcher`) starts.
    """

    reason: str
    install_hint: str = ""
    needs_launcher: bool = False


COLLECTIVES = frozenset(
    [
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "barrier",
        "send",
        "recv",
    ]
)


_EIGHT_BIT_FLOATS = names(EIGHT_BIT_FLOATS)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do: the dtypes it reduces and the dtypes it moves (torch names, by device type).

    `launcher` names the program that must start the ranks together ("mpirun"); "" if anybody may start them.
    `passive_target` says what a rank whose memory others reach must do for it, by windows or the memory plane: "none"
    (it may compute, sleep or be stopped), "thread" (a thread of the backend's answers for it: it may compute or sleep,
    but not be stopped), or "" where there is neither. `tcp` says when all bytes between processes of one host go over
    TCP, where a proxy can delay, cut or corrupt them: "always", "" (not), or the environment variable that asks for it
    with the value "tcp,self" ("UCX_TLS").
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

    def widens(self, device: str) -> frozenset[str]:
        """The dtypes that are reduced as float32, and rounded back, for a backend that does not reduce them itself."""
        reduces = self.reduces.get(device, frozenset())
        return _EIGHT_BIT_FLOATS - reduces if "float32" in reduces else frozenset()


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend as its plugin announces it. `probe`, `connect` and `memory` import lazily whatever they need.

    `connect` is None for a backend that has only a memory plane; `memory` is None for one that has none. `prepare`, if
    there is one, is called in every process that joins a job, a spare too, before it has a rank; it returns at once.
    """

    name: str
    api: tuple[int, int]
    description: str
    capabilities: Capabilities
    probe: Callable[[], Available | Unavailable]
    connect: Callable[[Context], Transport] | None
    memory: Callable[[], MemoryPlane] | None = None
    prepare: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class DetectorInfo:
    """A failure detector as its plugin announces it. `probe` and `make` import lazily whatever they need.

    `evidence`: "proof" if what it says is certain, "suspicion" if others have to agree. `make` gets a
    `holdfast.ft.detectors.detector.DetectorContext`, in the event loop of a process's runtime, and gives a `Detector`.
    """

    name: str
    api: tuple[int, int]
    description: str
    evidence: Literal["proof", "suspicion"]
    probe: Callable[[], Available | Unavailable]
    make: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One op as observers see it. `nbytes` counts this rank's input; `seconds` and `error` are set in `after_op`."""

    communicator: str
    epoch: int
    rank: int
    seq: int
    op: str
    nbytes: int
    seconds: float = 0.0
    error: BaseException | None = None


class HoldfastSpec:
    """The hooks."""

    @hookspec
    def holdfast_backends(self) -> list[BackendInfo]:
        """The backends of this plugin."""
        raise NotImplementedError

    @hookspec
    def holdfast_registers(self) -> Mapping[str, Callable[[str, str], Any]]:
        """URL scheme -> factory(url, cell_name) of a `holdfast.ft.registers.Cell`. The factory's docstring says in one
        line what the register is, for `holdfast backends`.
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
        """An op is about to start on this rank. Must be quick and must not raise."""

    @hookspec
    def after_op(self, event: OpEvent) -> None:
        """An op ended on this rank, well or not."""
