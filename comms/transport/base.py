"""The seam between a `Communicator` and a backend: what every transport must do, and what it is told.

A transport sees only clean work: the communicator has checked ranks, shapes, dtypes and devices, made tensors
contiguous, put ops in order, and turned timeouts into deadlines. It knows nothing of views, sessions or threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec
import torch
import torch.distributed as dist

from holdfast.comms._native import Order
from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.journal import Journal
from holdfast.comms.ops import ReduceOp
from holdfast.comms.tensors.packing import parts
from holdfast.comms.transport.window_memory import WindowMemory
from holdfast.comms.work import Work


class Peer(msgspec.Struct, frozen=True):
    """The process behind a rank. `host` identifies the machine's boot and pid namespace, `started` the process
    (its start time in clock ticks since boot, so that a recycled pid is told apart)."""

    host: str
    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Context:
    """All that a backend needs to connect one rank: who it is, who the others are, and where they meet.

    `store` is private to this communicator (nobody else's keys are in it). `peers` is in rank order. `deadline` is
    on `time.monotonic()`. `over()` says why there is no point in connecting any more; None while there is. A `journal`,
    if there is one, is to be told of long waits (`Journal.waits`).

    `previous` is the transport of the epoch before, whose ops have ended; what is good of it may be kept.
    `connect_payload` is up to four whole numbers for the others, which a transport may carry
    (`Transport.connect_payloads`). A backend whose rank has done its part, and waits for the others, may call
    `meanwhile(transport)`: what is to be made of the transport is made while they come. If the backend then raises, or
    returns another transport, it closes this one itself.
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
    meanwhile: Callable[[Transport], None] = lambda transport: None


@dataclass(frozen=True, slots=True)
class Form:
    """What is known of an op before its tensors are. `op`: all_reduce, broadcast, barrier; all_gather, reduce_scatter
    or all_to_all of single tensors. `nbytes` is the size of its input, `timeout` in seconds.
    """

    op: str
    dtype: torch.dtype | None
    nbytes: int
    root: int
    reduction: ReduceOp | None
    timeout: float


class Observed(Protocol):
    """Says whether anybody watches ops."""

    observed: bool


class FastPath(Protocol):
    """A shorter way for the ops that are most usual, past the checks and the bookkeeping of all others.

    Each returns whether the op was done. If not it may have begun: it must be called as any other then, with the same
    arguments, and goes on. What is not usual (arguments, an op before it that is still running, an observer) is never
    done here, and nothing is refused here.
    """

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, /) -> bool: ...
    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, /) -> bool: ...
    def broadcast(self, tensor: torch.Tensor, src: int, /) -> bool: ...
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, /) -> bool: ...
    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, /) -> bool: ...
    def barrier(self) -> bool: ...


class Transport(ABC):
    """The connected ranks of one communicator.

    Each op blocks until it is complete on this rank, or raises an error of `holdfast.comms.errors` by `deadline`
    (`time.monotonic()` seconds). Ops are called one at a time, in the same order on every rank. Only `abort` may be
    called from another thread while an op is running.

    Transports of a device with streams (`streams` is true) return once an op is in order on the current stream, as
    torch's own NCCL group does; what goes wrong later ends the next op, or whoever waits.
    """

    rank: int
    size: int
    streams: ClassVar[bool] = False
    device: torch.device | None = None
    """The one device whose tensors it takes; None for any of the context's type."""
    ends_before_exit: ClassVar[bool] = False
    """Whether a communicator that was never closed must be closed before the interpreter ends."""
    connect_payloads: Sequence[tuple[int, ...]] | None = None
    """Each rank's `Context.connect_payload`, if connecting has carried them."""

    def launch(self, name: str, op: Callable[[], None]) -> Work:
        """Run `op()`, which calls ops of this transport, beside the current stream: an asynchronous op, if `streams`.

        The work's `wait` puts what follows on the then current stream behind it.
        """
        raise NotImplementedError

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        """Reduce `tensor` over all ranks, in place. Every rank gets equal bits."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        """Reduce `tensor` into rank `dst`'s; the others' stay as they were."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int, deadline: float) -> None:
        """Copy rank `src`'s tensor to all."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, deadline: float) -> None:
        """Rank i's `tensor` into `outputs[i]` on every rank; sizes may differ from rank to rank."""

    @abstractmethod
    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, deadline: float
    ) -> None:
        """The reduction of every rank's `inputs[rank]` into `output`; sizes may differ from rank to rank."""

    @abstractmethod
    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], deadline: float) -> None:
        """`inputs[j]` of rank i into `outputs[i]` of rank j."""

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, deadline: float) -> None:
        """`all_gather` into equal parts of one contiguous tensor. A transport may have a faster way."""
        self.all_gather(parts(output, self.size), tensor, deadline)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        """`reduce_scatter` of equal parts of one contiguous tensor."""
        self.reduce_scatter(output, parts(tensor, self.size), op, deadline)

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, deadline: float) -> None:
        """`all_to_all` of equal parts of contiguous tensors."""
        self.all_to_all(parts(output, self.size), parts(tensor, self.size), deadline)

    @abstractmethod
    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, dst: int, deadline: float) -> None:
        """Rank i's `tensor` into `outputs[i]` on rank `dst`; `outputs` is None elsewhere."""

    @abstractmethod
    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, deadline: float) -> None:
        """`inputs[i]` of rank `src` into rank i's `tensor`; `inputs` is None elsewhere."""

    @abstractmethod
    def barrier(self, deadline: float) -> None:
        """Return once all ranks have entered."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int, tag: int, deadline: float) -> None:
        """Send to one rank; returns when `tensor` may be changed."""

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
        """All of the (tensor, peer, tag) sends and receives at once, without deadlock whatever their order."""

    def fast_path(self, order: Order, observers: Observed, journal: Journal | None) -> FastPath | None:
        """The fast path of a communicator that keeps this order, if this transport has one of its own."""
        return None

    def function(self, form: Form) -> Callable[..., None]:
        """Ops of a form, as a function of their output, tensor and deadline, as far as they have them."""
        reduction, root = form.reduction, form.root
        if reduction is None:
            calls: dict[str, Callable[..., None]] = {
                "broadcast": lambda tensor, deadline: self.broadcast(tensor, root, deadline),
                "all_gather": self.all_gather_single,
                "all_to_all": self.all_to_all_single,
                "barrier": self.barrier,
            }
            return calls[form.op]
        if form.op == "all_reduce":
            return lambda tensor, deadline: self.all_reduce(tensor, reduction, deadline)
        return lambda output, tensor, deadline: self.reduce_scatter_single(output, tensor, reduction, deadline)

    def window(self, tensor: torch.Tensor, deadline: float) -> WindowMemory:
        """Expose a contiguous `tensor` to all ranks and reach theirs; collective. For backends that have windows."""
        raise Unsupported("windows over this backend", "use comms.memory() for one-sided reads and writes")

    @abstractmethod
    def abort(self, error: HoldfastError) -> None:
        """End the op that is running, and all later ones, with `error`, within milliseconds. From any thread."""

    def rest(self) -> None:  # noqa: B027  (most have nothing to do)
        """A rank is gone: no op of all ranks can end any more but by `abort`. Do not keep a processor busy with waiting
        for that. From any thread.
        """

    def announce(self, word: bytes) -> bool:
        """End the ops of all other ranks, whose `announced` is `word` from then on: faster than to write to them. From
        any thread, by one rank at most. False if this transport cannot, or not so much; nothing has happened then.
        """
        return False

    @property
    def announced(self) -> bytes | None:
        """What another rank has announced here; None if none has."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release every descriptor, thread and segment. The communicator calls it once, with no op running."""
