"""The communicator: what a user calls. Its ops are those of `collectives`; here are its parts, and its end.

What it does not do: move bytes (transports), find peers (connect), decide who is alive (holdfast.ft).
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch

from holdfast.comms import objects
from holdfast.comms.collectives import Collectives
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Revoked, Unsupported
from holdfast.comms.execution.argument_checks import ArgumentChecks
from holdfast.comms.execution.executor import Body, Executor
from holdfast.comms.journal import Recorder
from holdfast.comms.op_description import OpDescription
from holdfast.comms.plugins.spec import BackendInfo
from holdfast.comms.quantities import seconds_or
from holdfast.comms.rendezvous.gathering import MeetingCount
from holdfast.comms.system import forks
from holdfast.comms.transport.base import Context, Peer, Transport
from holdfast.comms.transport.window_memory import WindowMemory
from holdfast.comms.window import Window, check_exposable
from holdfast.comms.work import Work

Tensor = torch.Tensor


class Communicator(Collectives):
    """The connected ranks of one epoch. Made by `holdfast.comms.connect`; a context manager.

    Ops run in the order they are issued, and every rank must issue the same. Each takes `timeout` (seconds; default:
    the communicator's) and `async_op`, and returns a `Work`, which is done unless `async_op` is true. Tensors may
    have any shape and strides. An op that fails ends the communicator: later ops raise `Revoked`; build the next one.

    Every op may raise, beside what it says: `PeerFailed`, `Revoked`, `OpTimeout`, `Mismatch`; and before any byte
    moves `Unsupported`, ValueError, TypeError, which leave the communicator as it was.
    """

    def __init__(
        self,
        transport: Transport,
        context: Context,
        info: BackendInfo,
        connect_part: Callable[..., Communicator],
        *,
        timeout: float,
        check: bool = False,
        on_close: Callable[[], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.device: torch.device = transport.device or context.device
        super().__init__(
            transport,
            ArgumentChecks(context.rank, context.size, self.device, info),
            Executor(transport, context, timeout, check, on_close, context.journal),
        )
        self.name: str = context.name
        self.epoch: int = context.epoch
        self.backend: str = info.name
        self._context = context
        self._connect_part = connect_part
        self._recorder = recorder
        self._splits: dict[tuple[int, ...], MeetingCount] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._windowed = info.capabilities.windows
        self._windows: list[Window] = []
        self._memories: list[WindowMemory] = []
        self._dropped = weakref.finalize(self, _dropped, self._executor, self._memories, repr(self))
        self._dropped.atexit = False
        forks.own(self, f"communicator {self.name!r}", ("rank", "size", "name", "epoch", "device", "backend"))

    def __repr__(self) -> str:
        over = self._executor.over
        state = "" if over is None else f", over: {over}"
        return (
            f"<Communicator {self.name!r}: rank {self.rank} of {self.size}, {self.backend}, epoch {self.epoch}{state}>"
        )

    @property
    def transport(self) -> Transport:
        """For the backend that builds the next epoch's communicator. Ops that go past this one break its order."""
        return self._transport

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The processes behind the ranks, in rank order."""
        return self._context.peers

    def check_movable(self, tensor: Tensor) -> None:
        """Raise as `send` and `recv` do for a tensor that they do not take."""
        self._check.movable(tensor)

    @property
    def connect_payloads(self) -> Sequence[tuple[int, ...]] | None:
        """What each rank had to say when it connected; None if the backend does not carry that."""
        return self._transport.connect_payloads

    @property
    def announced(self) -> bytes | None:
        """What another rank has announced here; None if none has. Not once this is closed."""
        return self._transport.announced

    @property
    def over(self) -> HoldfastError | None:
        """Why no more ops can run here; None while they can. From any thread."""
        return self._executor.over

    @property
    def progress(self) -> tuple[int, bool]:
        """How many collectives this rank has entered, the same on all ranks that are equally far, and whether it is
        inside of an op now. From any thread.
        """
        return self._executor.progress

    # -- objects: what msgpack can say (dicts, lists, strings, numbers, bytes, None); never pickle

    def broadcast_object(self, obj: objects.T | None, src: int, timeout: float | None = None) -> objects.T:
        """Rank `src`'s `obj`, on every rank. TypeError on the sender for what msgpack cannot say."""
        src = self._check.rank(src, "src")
        return objects.broadcast(self, obj, src, timeout)

    def all_gather_object(self, obj: objects.T, timeout: float | None = None) -> list[objects.T]:
        """Every rank's `obj`, in rank order. TypeError for what msgpack cannot say."""
        return objects.all_gather(self, obj, timeout)

    # -- other communicators

    def split(self, ranks: Sequence[int], timeout: float | None = None) -> Communicator:
        """A communicator of `ranks` of this one, in that order; called by exactly those ranks, within `timeout`
        seconds. It ends when this one is aborted or an op fails here, but outlives `close()`.
        """
        members = tuple(self._check.rank(member, "ranks") for member in ranks)
        if len(set(members)) != len(members) or self.rank not in members:
            raise ValueError(f"split({list(members)}) on rank {self.rank}: ranks must differ, and hold the caller's")
        part = self._connect_part(
            self,
            members,
            self._splits.setdefault(members, MeetingCount()),
            self._context,
            timeout=seconds_or(timeout, self._executor.timeout),
            op_timeout=self._executor.timeout,
            recorder=self._recorder,
        )
        self._members[part.name] = members
        self._executor.abort_part_on_end(part._executor)
        return part

    def in_its_ranks(self, failure: HoldfastError) -> HoldfastError:
        """`failure`, of this communicator or of one that was split from it, in ranks of this one."""
        if not isinstance(failure, PeerFailed | OpTimeout) or failure.communicator in ("", self.name):
            return failure
        members = self._members.get(failure.communicator)
        if members is None:
            return Revoked(self.epoch, str(failure))
        if isinstance(failure, PeerFailed):
            return PeerFailed([members[rank] for rank in failure.ranks], failure.evidence)
        missing = [members[rank] for rank in failure.missing_ranks]
        return OpTimeout(failure.op, failure.seq, failure.waited, missing)

    def window(self, tensor: Tensor, timeout: float | None = None) -> Window:
        """Let every rank read and write this rank's `tensor`, and reach theirs; collective.

        Sizes may differ from rank to rank, dtypes may not. `Unsupported` where the backend has no windows. Closing
        the communicator closes its windows.
        """
        given, tensor = tensor, self._check.operand(tensor)
        if not self._windowed:
            raise Unsupported(f"windows over {self.backend!r}", "use comms.memory() for one-sided reads and writes")
        check_exposable(tensor)
        memories: list[WindowMemory] = []
        self._executor.issue(
            OpDescription("window", tensor.nbytes, lambda: str(tensor.dtype), None, tensor.dtype),
            lambda: lambda deadline: memories.append(self._transport.window(tensor, deadline)),
            False,
            timeout,
        )
        window = Window(memories[0], tensor.dtype, self.rank, self._executor.timeout, self, given)
        self._windows = [*(other for other in self._windows if not other.closed), window]
        self._memories[:] = [each.memory for each in self._windows]
        return window

    # -- ops of one's own

    def issue(
        self, name: str, nbytes: int, body: Body, agreed: Callable[[], str], timeout: float | None = None
    ) -> Work:
        """Run an op of one's own, in order with the others: `body(deadline)` works on the transport alone."""
        return self._executor.issue(OpDescription(name, nbytes, agreed), lambda: body, False, timeout)

    # -- the end

    def announce(self, word: bytes) -> bool:
        """End the ops of the other ranks, which find `word` in `announced` then. False if the backend has no such way,
        `word` is too long for it (2,048 bytes are not), or no ops can run here: nothing has happened then. From any
        thread.
        """
        return self._executor.announce(word)

    def abort(self, reason: str | HoldfastError = "aborted") -> None:
        """End the op that is running here, and all later ones, now: with `reason`, or `Revoked` saying it.

        From any thread, as often as you like; the first reason stays. Peers that wait for this rank learn of it.
        """
        self._executor.abort(reason)

    def close(self) -> None:
        """Release what this rank holds, its windows too; idempotent. Ops that are still pending are aborted.

        One that is dropped without it says goodbye to its peers all the same, with a ResourceWarning here.
        """
        self._dropped.detach()
        for window in self._windows:
            window.close()
        self._executor.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        self.close()


def discard_unconnected(communicator: Communicator) -> None:
    """End a communicator that its ranks never used, whose transport the backend has closed itself."""
    communicator._dropped.detach()
    communicator._executor.discard()


def _dropped(executor: Executor, memories: Sequence[WindowMemory], what: str) -> None:
    """A communicator was collected that was not closed: close it, in a thread of its own, for this may be anywhere."""

    def close() -> None:
        for memory in memories:
            with contextlib.suppress(HoldfastError):
                memory.close()
        executor.close_when_done()

    if not executor.closed:
        threading.Thread(target=close, name="holdfast-dropped", daemon=True).start()
        warnings.warn(f"{what} was not closed: use `with`, or call close()", ResourceWarning, stacklevel=2)
