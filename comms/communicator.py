"""`Communicator`: the object that users call.

`collectives` checks the arguments of its ops, the executor runs them in order, transports move the bytes; `connect`
finds the peers, `holdfast.ft` detects failures.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar, overload

import torch

from holdfast.comms._native import PreparedOp
from holdfast.comms.codecs import objects
from holdfast.comms.codecs.objects import ObjectWork
from holdfast.comms.collectives import ArgumentChecks, CheckedOp, CheckedOps, plan_usual, prepare
from holdfast.comms.errors import HoldfastError, NotConnected, OpTimeout, PeerFailed, RegionGone, Revoked, Unsupported
from holdfast.comms.executor import Body, Executor, OpSettings
from holdfast.comms.hooks import AddedHooks, Hooks
from holdfast.comms.onesided.window import ATOMIC_DTYPES, Window, WindowInfo, check_exposable, shapes_of_all
from holdfast.comms.ops import OpDescription, Recv, ReduceOp, Send
from holdfast.comms.plugins.hints import Hints, Value
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import BackendInfo
from holdfast.comms.quantities import seconds_or
from holdfast.comms.rendezvous.handles import LastingIdentity
from holdfast.comms.rendezvous.offer_exchange import meeting_counters
from holdfast.comms.system import forks
from holdfast.comms.tensors.memory import Registration
from holdfast.comms.transport.base import Context, Peer, Transport, WindowMemory
from holdfast.comms.work import DONE, Work

Tensor = torch.Tensor
T = TypeVar("T")

_MOST_NAME = 200
"""Characters of the name of a split communicator."""


@dataclass(frozen=True, slots=True)
class CommunicatorInfo:
    """What a communicator is, and with which settings it runs. `hosts` identify the host of each rank.

    `library_version` is that of what the backend runs over ("UCX 1.18.0"); `transport` is by what its bytes go ("shared
    memory"). `ranks` are its members, as the communicator that it was split from numbers them. `options` are the
    `timeout` of ops and whether ops are compared before they run (`check`); `hints` have the values in force, None for
    one that the backend decides.
    """

    name: str
    backend: str
    library_version: str
    transport: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    epoch: int
    devices: tuple[torch.device, ...]
    options: Mapping[str, float | bool]
    hints: Mapping[str, Value | None]


@dataclass(frozen=True, slots=True)
class Connector:
    """The functions of `connect` that a communicator calls, for its splits and for other members."""

    connect_part: Callable[..., Communicator]
    make_handle: Callable[[Communicator], tuple[str, object]]
    check_members_of: Callable[..., object]
    connect_members_of: Callable[..., Communicator]


class Communicator:
    """The connected ranks of one epoch. Made by `holdfast.comms.connect`; a context manager.

    Ops run in the order they are issued, and every rank must issue the same. Each takes `timeout` (seconds; default:
    the communicator's) and `async_op`, and returns a `Work`, which is done unless `async_op` is true. Tensors may
    have any shape and strides. An op that fails ends the communicator: later ops raise `Revoked`; build the next one.

    Beside the errors it documents, every op may raise `PeerFailed`, `Revoked`, `OpTimeout` and `Mismatch`; and before
    any byte moves `Unsupported`, ValueError and TypeError, which leave the communicator usable.
    """

    def __init__(
        self,
        transport: Transport,
        context: Context,
        info: BackendInfo,
        connector: Connector,
        settings: OpSettings,
    ) -> None:
        self.device: torch.device = transport.device or context.device
        self.rank: int = transport.rank
        self.size: int = transport.size
        self._transport = transport
        self._check = ArgumentChecks(context.rank, context.size, self.device, info)
        self._added_hooks = AddedHooks() if settings.hooks is None else settings.hooks.added
        hooks = settings.hooks or Hooks(context.name, context.epoch, context.rank, self._added_hooks)
        self._executor = Executor(transport, context, settings, hooks)
        self._fast = self._executor.fast_path(partial(plan_usual, transport, self._check, self._executor.timeout))
        self._ops = CheckedOps(transport, self._check)
        self.name: str = context.name
        self.epoch: int = context.epoch
        self.backend: str = info.name
        self._context, self._info = context, info
        self._connector, self._recorder = connector, settings.recorder
        self._membership = LastingIdentity()
        self._splits = meeting_counters()
        self._windowed, self._atomics = info.capabilities.windows, info.capabilities.atomics
        self._windows: list[Window] = []
        self._memories: list[WindowMemory] = []
        self._parts: list[weakref.ref[Communicator]] = []
        self._watch_drop()
        forks.refuse_in_children(
            self, f"communicator {self.name!r}", ("rank", "size", "name", "epoch", "device", "backend")
        )

    def _watch_drop(self) -> None:
        """Close this communicator if it is garbage-collected unclosed."""
        self._dropped = weakref.finalize(self, _dropped, self._executor, self._memories, repr(self))
        self._dropped.atexit = False

    def __repr__(self) -> str:
        over = self._executor.over
        state = "" if over is None else f", over: {over}"
        return (
            f"<Communicator {self.name!r}: rank {self.rank} of {self.size}, {self.backend}, epoch {self.epoch}{state}>"
        )

    @property
    def transport(self) -> Transport:
        """The transport, for a backend that builds the next epoch's. Calling its ops directly breaks the op order."""
        return self._transport

    @property
    def hooks(self) -> Hooks:
        """The hooks before and after each op, and at the abort: see `holdfast.comms.hooks`."""
        return self._executor.hooks

    @property
    def info(self) -> CommunicatorInfo:
        """What this communicator is: its backend, transport, members, devices, and the settings in force."""
        status = registry().status_of(self._info)
        hints = {hint.name: self._context.hints.get(hint.name, hint.default) for hint in self._info.hints}
        _, members = self._executor.split_from
        return CommunicatorInfo(
            name=self.name,
            backend=self.backend,
            library_version=getattr(status, "detail", "") or f"holdfast {importlib.metadata.version('holdfast')}",
            transport=self._transport.medium or self.backend,
            rank=self.rank,
            size=self.size,
            ranks=members or tuple(range(self.size)),
            hosts=tuple(peer.host for peer in self.peers),
            epoch=self.epoch,
            devices=(self.device,),
            options=MappingProxyType({"timeout": self._executor.timeout, "check": self._executor.checks}),
            hints=MappingProxyType(hints),
        )

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The processes behind the ranks, in rank order."""
        return self._context.peers

    def check_message(self, tensor: Tensor, received: bool) -> Tensor:
        """The tensor as `recv`, if it is `received`, or `send` takes it: a plain one. Raises their errors for it."""
        given = self._check.output(tensor) if received else self._check.operand(tensor)
        self._check.movable(given)
        return given

    @property
    def connect_payloads(self) -> Sequence[tuple[int, ...]] | None:
        """Each rank's `connect_payload`; None if the backend does not deliver them."""
        return self._transport.connect_payloads

    @property
    def announced(self) -> bytes | None:
        """The word that another rank has announced; None if none has. Do not use it after `close`."""
        return self._transport.announced

    @property
    def over(self) -> HoldfastError | None:
        """Why no more ops can run here; None while they can. From any thread."""
        return self._executor.over

    @property
    def progress(self) -> tuple[int, bool]:
        """The number of collectives that this rank has entered, and whether it is inside an op. From any thread.

        Ranks that have come equally far have equal numbers.
        """
        return self._executor.progress

    # -- reductions

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | None = None,
        reproducible: bool = False,
        hints: Hints | None = None,
    ) -> Work:
        """Reduce `tensor` over all ranks, in place; every rank gets equal bits.

        With `reproducible` the bits depend neither on the number of ranks, their order, the algorithm nor the
        backend, only on the values (see `holdfast.comms.reproducible`).

        Sparse COO tensors are summed, averaged or summed scaled: the stored entries may differ from rank to rank.
        """
        fast = self._fast
        if (
            fast
            and timeout is None
            and hints is None
            and not reproducible
            and (work := fast.all_reduce(tensor, op, async_op))
        ):
            return work
        return self._issue(self._ops.all_reduce(tensor, op, reproducible), async_op, timeout, hints)

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Reduce `tensor` over all ranks into that of rank `dst`; on other ranks it is unchanged."""
        return self._issue(self._ops.reduce(tensor, dst, op), async_op, timeout, hints)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Reduce every rank's `inputs[i]` into rank i's `output`; shapes may differ from rank to rank."""
        return self._issue(self._ops.reduce_scatter(output, inputs, op), async_op, timeout, hints)

    def reduce_scatter_single(
        self,
        output: Tensor,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Reduce `tensor` and put its part i into rank i's `output`, which has 1/size of its elements."""
        fast = self._fast
        if fast and timeout is None and hints is None and (work := fast.reduce_scatter(output, tensor, op, async_op)):
            return work
        return self._issue(self._ops.reduce_scatter_single(output, tensor, op), async_op, timeout, hints)

    # -- moves

    def broadcast(
        self, tensor: Tensor, src: int, async_op: bool = False, timeout: float | None = None, hints: Hints | None = None
    ) -> Work:
        """Copy rank `src`'s `tensor` into every rank's."""
        fast = self._fast
        if fast and timeout is None and hints is None and (work := fast.broadcast(tensor, src, async_op)):
            return work
        return self._issue(self._ops.broadcast(tensor, src), async_op, timeout, hints)

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        tensor: Tensor,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Copy rank i's `tensor` into every rank's `outputs[i]`; shapes may differ from rank to rank."""
        return self._issue(self._ops.all_gather(outputs, tensor), async_op, timeout, hints)

    def all_gather_single(
        self,
        output: Tensor,
        tensor: Tensor,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Concatenate every rank's `tensor`, in rank order, into `output`, which has size times its elements."""
        fast = self._fast
        if fast and timeout is None and hints is None and (work := fast.all_gather(output, tensor, async_op)):
            return work
        return self._issue(self._ops.all_gather_single(output, tensor), async_op, timeout, hints)

    def all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Copy rank i's `inputs[j]` into rank j's `outputs[i]`; shapes may differ from pair to pair."""
        return self._issue(self._ops.all_to_all(outputs, inputs), async_op, timeout, hints)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Send a part of `tensor` to each rank, and concatenate the received parts in `output`, along dimension 0.

        Split sizes are numbers of rows, one for each rank; without them the rows are divided evenly.
        """
        fast, even = self._fast, output_split_sizes is None and input_split_sizes is None
        if fast and even and timeout is None and hints is None and (work := fast.all_to_all(output, tensor, async_op)):
            return work
        return self._issue(
            self._ops.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes), async_op, timeout, hints
        )

    def gather(
        self,
        tensor: Tensor,
        outputs: Sequence[Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Copy rank i's `tensor` into `outputs[i]` on rank `dst`; `outputs` is None on the other ranks."""
        return self._issue(self._ops.gather(tensor, outputs, dst), async_op, timeout, hints)

    def scatter(
        self,
        tensor: Tensor,
        inputs: Sequence[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Copy `inputs[i]` of rank `src` into rank i's `tensor`; `inputs` is None on the other ranks."""
        return self._issue(self._ops.scatter(tensor, inputs, src), async_op, timeout, hints)

    def barrier(self, async_op: bool = False, timeout: float | None = None, hints: Hints | None = None) -> Work:
        """Return once every rank has entered."""
        fast = self._fast
        if fast and timeout is None and hints is None and (work := fast.barrier(async_op)):
            return work
        return self._issue(self._ops.barrier(), async_op, timeout, hints)

    # -- point to point

    def send(
        self,
        tensor: Tensor,
        dst: int,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Send `tensor` to rank `dst`. Once the work is done, the caller may change `tensor`."""
        return self._issue(self._ops.send(tensor, dst, tag), async_op, timeout, hints)

    def recv(
        self,
        tensor: Tensor,
        src: int,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Receive into `tensor` what rank `src` sent under `tag`."""
        return self._issue(self._ops.recv(tensor, src, tag), async_op, timeout, hints)

    def batch_send_recv(
        self,
        batch: Sequence[Send | Recv],
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Run all sends and receives of `batch` at once, without deadlock in any order."""
        return self._issue(self._ops.batch_send_recv(batch), async_op, timeout, hints)

    def _issue(self, op: CheckedOp, async_op: bool, timeout: float | None, hints: Hints | None) -> Work:
        return self._executor.issue(op.description, op.prepare, async_op, timeout, self._check.hints(hints))

    # -- ops that are started many times

    def prepare(self, name: str, /, *args: Any, **named: Any) -> PreparedOp:
        """Check the arguments of an op once, and return a handle whose `start()` runs it; `handle()` is the same.

            total = comm.prepare("all_reduce", tensor, op=ReduceOp.MAX)
            for _ in range(1000):
                total()

        `start(async_op=False, timeout=None)` returns the op's `Work`, and costs less than the plain call. The op runs
        on the tensors as they are then: a changed one is checked again. A handle refers to its communicator, and raises
        its `Revoked` once that is over. Raises ValueError for an unknown `name`, and the errors of the op's arguments.
        """
        return prepare(self, name, args, named)

    # -- objects: sent as msgpack (dicts, lists, strings, numbers, bytes, None), never as pickle

    # With `async_op` each returns an `ObjectWork`, whose `wait` returns what the call would.

    @overload
    def broadcast_object(
        self, obj: T | None, src: int, timeout: float | None = None, async_op: Literal[False] = False
    ) -> T: ...
    @overload
    def broadcast_object(
        self, obj: T | None, src: int, timeout: float | None = None, *, async_op: Literal[True]
    ) -> ObjectWork[T]: ...
    def broadcast_object(self, obj: T | None, src: int, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return rank `src`'s `obj` on every rank. Raises TypeError on every rank for a type that msgpack lacks."""
        return objects.broadcast(self, obj, self._check.rank(src, "src"), timeout, async_op)

    @overload
    def all_gather_object(self, obj: T, timeout: float | None = None, async_op: Literal[False] = False) -> list[T]: ...
    @overload
    def all_gather_object(
        self, obj: T, timeout: float | None = None, *, async_op: Literal[True]
    ) -> ObjectWork[list[T]]: ...
    def all_gather_object(self, obj: T, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return every rank's `obj`, in rank order.

        Raises TypeError on every rank if one of them is of a type that msgpack lacks. The communicator stays usable.
        """
        return objects.all_gather(self, obj, timeout, async_op)

    @overload
    def gather_object(
        self, obj: T, dst: int = 0, async_op: Literal[False] = False, timeout: float | None = None
    ) -> list[T] | None: ...
    @overload
    def gather_object(
        self, obj: T, dst: int = 0, *, async_op: Literal[True], timeout: float | None = None
    ) -> ObjectWork[list[T] | None]: ...
    def gather_object(self, obj: T, dst: int = 0, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return every rank's `obj`, in rank order, on rank `dst`; None on the others.

        Raises TypeError on a rank whose object is of a type that msgpack lacks, and on rank `dst`.
        """
        return objects.gather(self, obj, self._check.rank(dst, "dst"), timeout, async_op)

    @overload
    def scatter_object(
        self, objs: Sequence[T] | None, src: int = 0, async_op: Literal[False] = False, timeout: float | None = None
    ) -> T: ...
    @overload
    def scatter_object(
        self, objs: Sequence[T] | None, src: int = 0, *, async_op: Literal[True], timeout: float | None = None
    ) -> ObjectWork[T]: ...
    def scatter_object(
        self, objs: Sequence[T] | None, src: int = 0, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Return element i of rank `src`'s `objs` on rank i; `objs` is None on the other ranks.

        Raises TypeError on rank `src` for an object of a type that msgpack lacks, and on the rank that awaits it.
        """
        src = self._check.rank(src, "src")
        if self.rank != src and objs:
            raise ValueError(f"objs belongs to rank {src} alone; pass None on rank {self.rank}")
        if self.rank == src and (objs is None or len(objs) != self.size):
            count = "none" if objs is None else len(objs)
            raise ValueError(f"rank {src} must pass one object for each of {self.size} ranks, not {count}")
        return objects.scatter(self, objs, src, timeout, async_op)

    @overload
    def send_object(
        self, obj: object, dst: int, tag: int = 0, async_op: Literal[False] = False, timeout: float | None = None
    ) -> None: ...
    @overload
    def send_object(
        self, obj: object, dst: int, tag: int = 0, *, async_op: Literal[True], timeout: float | None = None
    ) -> ObjectWork[None]: ...
    def send_object(
        self, obj: object, dst: int, tag: int = 0, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Send `obj` to rank `dst`, which calls `recv_object`.

        Raises TypeError on both ranks for a type that msgpack lacks.
        """
        dst, tag = self._check.line(dst, "dst", tag)
        return objects.send(self, obj, dst, tag, timeout, async_op)

    def recv_object(self, src: int, tag: int = 0, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return the object that rank `src` sent to this rank by `send_object` under `tag`."""
        src, tag = self._check.line(src, "src", tag)
        return objects.recv(self, src, tag, timeout, async_op)

    # -- other communicators

    @overload
    def split(self, ranks: Sequence[int], timeout: float | None = None, *, lasting: bool = False) -> Communicator: ...

    @overload
    def split(
        self,
        ranks: Sequence[int] | None,
        timeout: float | None = None,
        name: str | None = None,
        hints: Hints | None = None,
    ) -> Communicator | None: ...

    def split(
        self,
        ranks: Sequence[int] | None,
        timeout: float | None = None,
        name: str | None = None,
        hints: Hints | None = None,
        lasting: bool = False,
    ) -> Communicator | None:
        """Make a communicator of `ranks`, in that order. These ranks call this alike, within `timeout` seconds.

        Unless it is `lasting`, it ends when this one is aborted or an op fails here; it outlives `close()`. It inherits
        this one's hints, but for those in `hints`. Its name is `name`, or made of the ranks. A rank that is not in
        `ranks`, or passes None for them, gets None at once: it may call this, but need not.
        """
        self._executor.check_usable()
        members = tuple(self._check.rank(member, "ranks") for member in ranks or ())
        if ranks is not None and (not members or len(set(members)) != len(members)):
            raise ValueError(f"split({list(members)}) on rank {self.rank}: ranks must differ, and be at least one")
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= _MOST_NAME and name != self.name):
            raise ValueError(f"split: name must be a new one, of 1 to {_MOST_NAME} characters, not {name!r:.80}")
        if self.rank not in members:
            return None
        part = self._connector.connect_part(
            self,
            members,
            self._splits(members),
            timeout=seconds_or(timeout, self._executor.timeout),
            name=name,
            hints=hints,
        )
        part._executor.split_from = self.name, members
        part._executor.untold = self._executor.untold
        self._parts = [*(other for other in self._parts if other() is not None), weakref.ref(part)]
        if not lasting:
            self._executor.abort_part_on_end(part._executor)
        return part

    def handle(self) -> str:
        """This process's handle, for `reconfigure` in the processes that it will be connected with.

        A text of a few hundred bytes, the same for the life of this object. From the first call on this process listens
        on an address of its own (HOLDFAST_HOST, else loopback) until this object is collected.
        """
        membership = self._membership
        with membership.turn:
            if not membership.handle:
                membership.handle, membership.store = self._connector.make_handle(self)
            return membership.handle

    def reconfigure(
        self,
        uuid: int | str,
        handles: Sequence[str] | Set[str],
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Become the communicator of exactly the processes in `handles`; collective over them.

        All call it within `timeout` seconds. A list is in rank order; a set is sorted, alike in all processes. `uuid`
        names this change, and is a new one for each. Pending ops raise `Revoked`. A member that is left out learns it
        from its next op; it joins again when its handle is passed again. This object then has another rank, size, epoch
        and name; hooks, callbacks and hints stay, but for those in `hints`. It works after an abort, a failed op, a
        `close`, and the death of members that are left out. The members meet in the process of the first.

        Raises, before anything changes, ValueError for malformed or repeated handles, or if this process's own is
        missing; `Mismatch` for those of another job, version or device; `BackendUnavailable` if the members have no
        backend in common; HoldfastError if `uuid` was used before; `PeerFailed` if one of them is gone. After that the
        errors of `connect`: then this communicator is over, and may be reconfigured again. Returns a work that is done.
        """
        membership = self._membership
        with membership.turn:
            limit = seconds_or(timeout, self._executor.timeout)
            fresh = self._connector.connect_members_of(self, uuid, handles, limit, hints)
            fresh._dropped.detach()
            self._dropped.detach()
            self.__dict__.update({**fresh.__dict__, "_membership": membership})
            membership.suspended = None
            self._watch_drop()
        return DONE

    def suspend(self, timeout: float | None = None) -> None:
        """Release the transport, with its memory and connections, until `resume`; collective.

        It closes windows and registrations. Until `resume`, or `reconfigure`, ops raise `NotConnected`.
        """
        with (membership := self._membership).turn:
            members = self.all_gather_object((secrets.token_hex(8), self.handle()), timeout)
            self._executor.over_once_closed = NotConnected(self.name, suspended=True)
            self.close()
            membership.suspended = f"resumed-{members[0][0]}", [handle for _, handle in members]

    def resume(self, timeout: float | None = None) -> None:
        """Connect the members of a suspended communicator again, in the same ranks; collective.

        Epoch, name and errors are as of `reconfigure`. Does nothing if it is not suspended.
        """
        with (membership := self._membership).turn:
            if membership.suspended is not None:
                self.reconfigure(*membership.suspended, timeout=timeout)

    def check_members(self, uuid: int | str, handles: Sequence[str] | Set[str], hints: Hints | None = None) -> None:
        """Raise what `reconfigure` with these arguments raises before anything changes."""
        self._connector.check_members_of(self, uuid, handles, hints)

    def in_its_ranks(self, failure: HoldfastError) -> HoldfastError:
        """Translate the ranks in `failure`, an error of this communicator or a split of it, to ranks of this one."""
        if not isinstance(failure, PeerFailed | OpTimeout) or failure.communicator in ("", self.name):
            return failure
        whole, members = failure.split_from
        if whole != self.name:
            return Revoked(self.epoch, str(failure))
        if isinstance(failure, PeerFailed):
            return PeerFailed([members[rank] for rank in failure.ranks], failure.evidence)
        missing = [members[rank] for rank in failure.missing_ranks]
        return OpTimeout(failure.op, failure.seq, failure.waited, missing)

    def window(self, tensor: Tensor | None = None, timeout: float | None = None) -> Window:
        """Expose `tensor` to all ranks for reads and writes, and access theirs; collective.

        Sizes may differ from rank to rank, dtypes may not. With None, the window has no tensor until all ranks call its
        `register`. Raises `Unsupported` if the backend has no windows. Closing the communicator closes its windows.
        """
        if tensor is not None:
            self._check.operand(tensor)
        if not self._windowed:
            raise Unsupported(f"windows over {self.backend!r}", "use comms.memory() for one-sided reads and writes")
        meet = partial(self.issue, "deregister", 0, self._transport.barrier, lambda: "")
        window = Window(self._expose, meet, self.rank, self._executor.timeout, self)
        if tensor is not None:
            window.register(tensor, timeout)
        self._windows = [*(other for other in self._windows if not other.closed), window]
        return window

    def _expose(self, tensor: Tensor, timeout: float | None) -> tuple[WindowMemory, WindowInfo]:
        tensor = self._check.operand(tensor)
        check_exposable(tensor)
        self._memories[:] = [memory for memory in self._memories if not memory.leaving]
        made: list[tuple[WindowMemory, WindowInfo]] = []

        def body(deadline: float) -> None:
            shapes = shapes_of_all(self._transport, tensor, deadline)
            memory = self._transport.window(tensor, deadline)
            self._memories.append(memory)  # to be closed, even if Ctrl-C keeps the window from the caller
            sizes = tuple(size // tensor.dtype.itemsize for size in memory.sizes)
            atomics = self._atomics and tensor.dtype in ATOMIC_DTYPES
            made.append((memory, WindowInfo(sizes, shapes, tensor.dtype, self.device, memory.access, atomics)))

        description = OpDescription("window", tensor.nbytes, detail=tensor.dtype)
        self._executor.issue(description, lambda: body, False, timeout)
        return made[0]

    def register(self, tensor: Tensor) -> Registration:
        """Let the backend prepare the memory of a contiguous `tensor` for many ops; not collective.

        Over shm it goes to huge pages, through which peers read it faster; `info` of what is returned says what was
        done, or that this backend gains nothing. The tensor's contents and address stay. See also `comms.empty`.
        """
        plain = self._check.operand(tensor)
        if not plain.is_contiguous():
            raise ValueError("a registration needs a contiguous tensor: it is about one stretch of memory")
        self._executor.check_usable()
        return Registration(plain, self._transport.register(plain))

    # -- custom ops

    def issue(
        self,
        name: str,
        nbytes: int,
        body: Body,
        agreed: Callable[[], str] | None,
        timeout: float | None = None,
        root: int = -1,
        async_op: bool = False,
    ) -> Work:
        """Run a custom op in order with the others: `body(deadline)` calls the transport only.

        `agreed()` returns the text that must be equal on all ranks; it is None for an op that not all ranks issue.
        `root` is the root or the other side, -1 for an op without one.
        """
        detail = agreed() if agreed is not None else f"from {root}" if root >= 0 else None
        description = OpDescription(name, nbytes, agreed is not None, detail=detail, peer=root)
        return self._executor.issue(description, lambda: body, async_op, timeout)

    # -- the end

    def settle(self) -> None:
        """Wait for all ops that were issued here, on parts and on windows, without waits for signals. Not an op itself.

        Raises the error of an op that failed, if no `wait` has raised it. On a device with streams it waits until the
        device has done what the current stream holds. It is no failure if an abort has ended no op.
        """
        self._executor.settle()
        for window in self._windows:
            try:
                window.settle()
            except RegionGone as error:
                raise Revoked(self.epoch, f"a call of a window failed: {error}") from error
        for reference in self._parts:
            if (part := reference()) is not None:
                part.settle()

    def announce(self, word: bytes, why: HoldfastError) -> bool:
        """End the ops of all other ranks, and set their `announced` to `word`; its own end with `why`. From any thread.

        Returns False, and does nothing, if the backend has no such channel, `word` is too long for it (every one takes
        2,048 bytes), or this communicator is over.
        """
        return self._executor.announce(word, why)

    def abort(self, reason: str | HoldfastError = "aborted") -> None:
        """Make the running op, and all later ones, raise `reason`, or a `Revoked` with that text.

        From any thread, any number of times; the first reason stays. Peers that wait for this rank are notified.
        """
        self._executor.abort(reason)

    def close(self) -> None:
        """Release this rank's resources, windows included, and abort pending ops. Idempotent.

        A communicator that is garbage-collected without `close` is closed in a thread, with a ResourceWarning. A
        signal's handler may call this, like `abort`: what it interrupts ends first.
        """
        self._dropped.detach()
        for window in self._windows:
            if window.close_when_left(self.close):
                return
        for memory in self._memories:
            memory.close()
        self._executor.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        self.close()


def discard_unconnected(communicator: Communicator) -> None:
    """End a communicator that was never used. The backend has closed its transport itself."""
    communicator._dropped.detach()
    communicator._executor.discard()


def _dropped(executor: Executor, memories: Sequence[WindowMemory], what: str) -> None:
    """Close a communicator that was garbage-collected unclosed. In a thread: finalizers run at arbitrary points."""

    def close() -> None:
        for memory in memories:
            with contextlib.suppress(HoldfastError):
                memory.close()
        executor.close_when_done()

    if not executor.closed:
        threading.Thread(target=close, name="holdfast-dropped", daemon=True).start()
        warnings.warn(f"{what} was not closed: use `with`, or call close()", ResourceWarning, stacklevel=2)
