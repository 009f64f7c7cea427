"""`Transport`: the ops that a backend implements for a `Communicator`, and `Context`, what it is connected with.

The communicator has checked ranks, shapes, dtypes and devices, made tensors contiguous, put ops in order, and turned
timeouts into deadlines. A transport knows nothing of views, sessions or threads. `WindowMemory` is what it
implements for windows.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, final

import msgspec
import torch
import torch.distributed as dist

from holdfast.comms._native import Board
from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone, Unsupported
from holdfast.comms.ops import Journal, OpPlan, ReduceOp
from holdfast.comms.system.waiting import Wait
from holdfast.comms.tensors.packing import parts
from holdfast.comms.work import Work


class Peer(msgspec.Struct, frozen=True):
    """The process behind a rank.

    `host` identifies the machine's boot and the pid namespace. `started` is the process's start time in clock ticks
    since boot: it distinguishes the process from a later one with the same pid.
    """

    host: str
    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of one message between two ranks: `latency` in seconds, `bandwidth` in bytes a second.

    `name` names the path ("mybackend/tcp"); measured constants are stored under it. A link without a name is not
    measured.
    """

    latency: float
    bandwidth: float
    name: str = ""

    def seconds(self, messages: float, nbytes: float) -> float:
        return messages * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Context:
    """The arguments of a backend's `connect`: the rank, its peers, and the store through which they meet.

    `store` holds the keys of this communicator alone. `peers` is in rank order. `deadline` is on `time.monotonic()`.
    `over()` returns the reason to stop connecting, or None. The backend reports long waits to `journal`, if there is
    one (`Journal.waits`).

    `previous` is the transport of the epoch before; its ops have ended, and the backend may reuse its parts.
    `connect_payload` is up to four integers for the other ranks; a transport may deliver them
    (`Transport.connect_payloads`). `address` is where the other ranks reach this host ("": not known).

    `links` are the costs that the backend announced. `hints` are those that the user passed: announced, checked, and
    the same on all ranks.

    While a backend waits for the other ranks, it may call `meanwhile(transport)`: the
    caller then builds the communicator over `transport` during that wait. If the backend raises afterwards, or returns
    another transport, it must close this one itself.
    """

    rank: int
    size: int
    name: str
    epoch: int
    device: torch.device
    store: dist.Store
    peers: tuple[Peer, ...]
    deadline: float
    over: Callable[[], HoldfastError | None] = lambda: None
    journal: Journal | None = None
    previous: Transport | None = None
    connect_payload: tuple[int, ...] = ()
    address: str = ""
    meanwhile: Callable[[Transport], None] = lambda transport: None
    links: tuple[Link, ...] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)

    def link(self, name: str) -> Link:
        """The announced cost of the link of this name."""
        return next(link for link in self.links if link.name == name)


class Transport(ABC):
    """The connected ranks of one communicator.

    Each op blocks until it is complete on this rank, or raises an error of `holdfast.comms.errors` by `deadline`
    (`time.monotonic()` seconds). Ops are called one at a time, in the same order on every rank. Only `abort` may be
    called from another thread while an op is running.

    Transports of a device with streams (`streams` is true) return once an op is enqueued on the current stream, as
    torch's own NCCL group does. A later failure is raised by the next op, or by a wait for the work.
    """

    rank: int
    size: int
    streams: ClassVar[bool] = False
    device: torch.device | None = None
    """The only device that this transport accepts; None if it accepts any device of the context's type."""
    ends_before_exit: ClassVar[bool] = False
    """Whether a communicator that was never closed must be closed before the interpreter ends."""
    interrupted: bool = False
    """Whether a signal's handler has cut an op short: the library below may go on with it."""
    board: Board | None = None
    """The memory that all ranks map, over which compiled code runs usual ops; None: they are functions."""
    connect_payloads: Sequence[tuple[int, ...]] | None = None
    """Each rank's `Context.connect_payload`, if connecting has delivered them."""
    medium: str = ""
    """By what the bytes go, in words ("shared memory"), if it is not what the backend's name says."""
    op_hints: Mapping[str, Any] = MappingProxyType({})
    """The hints of the running op, checked as those of `Context`."""

    def launch(self, name: str, op: Callable[[], None]) -> Work:
        """Run an asynchronous op on a side stream: `op()` calls ops of this transport. Only if `streams` is true.

        The work's `wait` makes the stream that is current at that time wait for the op.
        """
        raise NotImplementedError

    def settle(self, deadline: float) -> None:
        """Wait until the device has done what this thread's stream and the side stream hold. Only if `streams` is true.

        Raises `OpTimeout`, and what has ended the transport: then nobody knows what the device has done.
        """
        raise NotImplementedError

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        """Reduce `tensor` over all ranks, in place. Every rank gets equal bits."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        """Reduce all ranks' `tensor` into that of rank `dst`; on other ranks it is unchanged."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int, deadline: float) -> None:
        """Copy rank `src`'s tensor to all ranks."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, deadline: float) -> None:
        """Copy rank i's `tensor` into `outputs[i]` on every rank; sizes may differ from rank to rank."""

    @abstractmethod
    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, deadline: float
    ) -> None:
        """Reduce every rank's `inputs[rank]` into `output`; sizes may differ from rank to rank."""

    @abstractmethod
    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], deadline: float) -> None:
        """Copy `inputs[j]` of rank i into `outputs[i]` of rank j."""

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, deadline: float) -> None:
        """`all_gather` into equal parts of one contiguous tensor. A transport may override it with a faster one."""
        self.all_gather(parts(output, self.size), tensor, deadline)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        """`reduce_scatter` of equal parts of one contiguous tensor."""
        self.reduce_scatter(output, parts(tensor, self.size), op, deadline)

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, deadline: float) -> None:
        """`all_to_all` of equal parts of contiguous tensors."""
        self.all_to_all(parts(output, self.size), parts(tensor, self.size), deadline)

    @abstractmethod
    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, dst: int, deadline: float) -> None:
        """Copy rank i's `tensor` into `outputs[i]` on rank `dst`; `outputs` is None on other ranks."""

    @abstractmethod
    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, deadline: float) -> None:
        """Copy `inputs[i]` of rank `src` into rank i's `tensor`; `inputs` is None on other ranks."""

    @abstractmethod
    def barrier(self, deadline: float) -> None:
        """Return once all ranks have entered."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int, tag: int, deadline: float) -> None:
        """Send `tensor` to one rank; return when the caller may change `tensor`."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int, tag: int, deadline: float) -> None:
        """Receive from one rank."""

    @abstractmethod
    def batch_send_recv(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        recvs: Sequence[tuple[torch.Tensor, int, int]],
        deadline: float,
    ) -> None:
        """Run all (tensor, peer, tag) sends and receives at once, without deadlock in any order."""

    def function(self, plan: OpPlan) -> Callable[..., None]:
        """A function that runs ops of this plan: all_reduce, broadcast, barrier, or those of single tensors.

        It takes those of (output, tensor, deadline) that the op has. A transport may override it with a faster one.
        """
        reduction, root = plan.reduction, plan.root
        if reduction is None:
            calls: dict[str, Callable[..., None]] = {
                "broadcast": lambda tensor, deadline: self.broadcast(tensor, root, deadline),
                "all_gather": self.all_gather_single,
                "all_to_all": self.all_to_all_single,
                "barrier": self.barrier,
            }
            return calls[plan.op]
        if plan.op == "all_reduce":
            return lambda tensor, deadline: self.all_reduce(tensor, reduction, deadline)
        return lambda output, tensor, deadline: self.reduce_scatter_single(output, tensor, reduction, deadline)

    def async_function(self, plan: OpPlan) -> Callable[..., Work] | None:
        """As `function`, for asynchronous ops: it launches them. None if the communicator's worker thread runs them."""
        return partial(self._launch_planned, plan.op, self.function(plan)) if self.streams else None

    def _launch_planned(self, name: str, call: Callable[..., None], *arguments: Any) -> Work:
        return self.launch(name, partial(call, *arguments))

    def register(self, tensor: torch.Tensor) -> str:
        """Prepare the memory of a contiguous tensor for many ops; return what was done with it, in words."""
        return "nothing to gain: this backend copies, or its library registers memory by itself"

    def window(self, tensor: torch.Tensor, deadline: float) -> WindowMemory:
        """Expose a contiguous `tensor` to all ranks, and access theirs; collective. For backends with windows."""
        raise Unsupported("windows over this backend", "use comms.memory() for one-sided reads and writes")

    @abstractmethod
    def abort(self, error: HoldfastError) -> None:
        """Make the running op, and all later ones, raise `error` within milliseconds. From any thread."""

    def rest(self) -> None:  # noqa: B027  (most transports do not spin)
        """Stop spinning in waits: a rank is gone, so only `abort` can end a collective. From any thread."""

    def announce(self, word: bytes, why: HoldfastError) -> bool:
        """End the ops of all other ranks, and set their `announced` to `word`; faster than a message to each.

        This rank's own ops end with `why`. From any thread, by one rank at most. Returns False, and does nothing, if
        the transport has no such channel or `word` is too long for it.
        """
        return False

    @property
    def announced(self) -> bytes | None:
        """The word that another rank has announced; None if none has."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release every descriptor, thread and segment. The communicator calls this once, while no op runs."""


def gather_bytes(transport: Transport, own: bytes | bytearray, deadline: float) -> list[bytes]:
    """The bytes of each rank, in rank order; collective. All ranks pass the same number."""
    gathered = [torch.zeros(len(own), dtype=torch.uint8, device="cpu") for _ in range(transport.size)]
    transport.all_gather(gathered, torch.frombuffer(bytearray(own), dtype=torch.uint8), deadline)
    return [bytes(each.numpy()) for each in gathered]


Tensor = torch.Tensor


class WindowMemory(ABC):
    """Reads and writes the exposed bytes of other ranks. Offsets are in bytes; the caller has checked them."""

    access: ClassVar[Literal["mapped", "messages"]] = "messages"
    """How other ranks' memory is reached: mapped into this process, or by their answers."""
    sizes: Sequence[int]
    """The size of each rank's window, in bytes."""
    leaving = False
    """True once this rank closes the window: calls in progress then raise `closed_here()` at their next check."""

    def __init__(self, ranks: int) -> None:
        self._consumed = [0] * ranks
        self._consuming = threading.Lock()

    @abstractmethod
    def write(self, rank: int, offset: int, source: Tensor, deadline: float) -> None:
        """Copy a contiguous tensor into a rank's window. Raises `RegionGone`."""

    @abstractmethod
    def read(self, rank: int, offset: int, into: Tensor, deadline: float) -> None:
        """Copy from a rank's window into a contiguous tensor. Raises `RegionGone`."""

    @abstractmethod
    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        """Add to an integer, atomically, wrapping around; return the old value."""

    @abstractmethod
    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        """Set an integer to `desired` if it is `expected`, atomically; return the old value."""

    @abstractmethod
    def signal(self, rank: int, deadline: float) -> None:
        """Add one to the count of signals from this rank to `rank`."""

    @abstractmethod
    def count_signals(self, rank: int) -> int:
        """The number of signals from `rank` that have arrived until now."""

    @abstractmethod
    def check_live(self, rank: int) -> None:
        """Raise `RegionGone` if a window is closed, here or at `rank`, or that process is gone."""

    @final
    def wait_signal(self, rank: int, deadline: float) -> None:
        """Wait for, and consume, one signal from `rank`. Raises `OpTimeout`, `RegionGone`."""
        Wait().until(
            lambda: self._consume_signal(rank),
            lambda: self.check_live(rank),
            deadline,
            lambda seconds: OpTimeout("wait_signal", self._consumed[rank] + 1, seconds, (rank,)),
        )

    def _consume_signal(self, rank: int) -> bool:
        """Consume a signal from `rank`; whether there was one."""
        with self._consuming:
            if self.count_signals(rank) <= self._consumed[rank]:
                return False
            self._consumed[rank] += 1
            return True

    def map(self, rank: int) -> Tensor:
        """The bytes of a rank's window, which the tensor keeps mapped. Raises `RegionGone`. Only if "mapped"."""
        raise Unsupported(f"map of a window that is reached by {self.access}", "use get and put")

    @abstractmethod
    def flush(self, rank: int | None, deadline: float) -> None:
        """Return when everything issued to `rank` (None: to all ranks) has taken effect there."""

    @abstractmethod
    def close(self) -> None:
        """Withdraw this rank's memory: other ranks get `RegionGone`. No call of this rank is running. Idempotent."""


def closed_here() -> RegionGone:
    """The error of a call on a window that this rank has closed."""
    return RegionGone("this rank has closed the window; make another one")


def closed_there(rank: int) -> RegionGone:
    """The error of a call that accesses memory of a rank that has closed its window."""
    return RegionGone(f"rank {rank} has closed its window; make another one")
