"""Hierarchical collectives: over one transport within a host (shared memory, NCCL), over one between hosts.

Three transports are connected: `flat` over all ranks, `inner` over those of this host, and a `rail`: rank i of each
host, for every i below the size of the smallest host. An all_reduce is a reduce-scatter within each host, an all_reduce
of each part along its rail, and an all-gather within the host. So each byte goes between hosts once for a host, and not
once for a rank; and all ranks send at once.

all_reduce and broadcast take hosts of any sizes, all_gather and reduce_scatter hosts of one size; all other ops, and
those for which the cost model says so, run over `flat`. Every rank chooses alike: by sizes, and by rank 0's constants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from holdfast.backends.hier.choice import MEGABITS, WITHIN, WITHIN_DEVICES, Choice, HostLayout
from holdfast.comms.algorithms.message_passing import cost
from holdfast.comms.arithmetic import SCALED, accumulation_dtype, postscale, prescale
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Revoked, Unsupported
from holdfast.comms.ops import Journal, OpTensors, ReduceOp
from holdfast.comms.plugins.registry import registry
from holdfast.comms.transport.base import Context, Transport
from holdfast.comms.transport.liveness import is_gone
from holdfast.comms.work import Work

Tensor = torch.Tensor


_BETWEEN, _BETWEEN_DEVICES = cost.Link(25e-6, 1.5e9), cost.Link(15e-6, 20e9)
"""The costs of a message between hosts over TCP, and over RDMA between GPUs, where the outer transport has none."""


class _Part:
    """A transport over some of the ranks. Its errors name ranks of the whole."""

    def __init__(
        self,
        transport: Transport,
        members: tuple[int, ...],
        context: Context,
        ended: Callable[[], HoldfastError | None] = lambda: None,
    ) -> None:
        """`ended()` is what has ended the whole, if that is known."""
        self.transport, self.members, self._ended = transport, members, ended
        self._epoch, self._peers = context.epoch, context.peers

    def run(self, op: str, *arguments: Any) -> None:
        """Call an op of the transport."""
        try:
            getattr(self.transport, op)(*arguments)
        except HoldfastError as error:
            if (told := self._of_whole(error)) is error:
                raise
            raise told from error

    def _of_whole(self, error: HoldfastError) -> HoldfastError:
        if (ended := self._ended()) is not None:
            return ended.again()
        if isinstance(error, PeerFailed) and not error.ranks:
            # A library that lost a connection may not know the rank; the kernel may know of one in another part.
            return PeerFailed([rank for rank, peer in enumerate(self._peers) if is_gone(peer)], error.evidence)
        if isinstance(error, Revoked) and self.members != tuple(range(self.transport.size)):
            return Revoked(self._epoch, f"{error.reason} (counted among ranks {list(self.members)})")
        return _renumbered(error, self.members)


def _renumbered(error: HoldfastError, members: Sequence[int]) -> HoldfastError:
    """The same error with the ranks of the whole, if it names ranks of a part."""
    if isinstance(error, PeerFailed):
        return PeerFailed([members[rank] for rank in error.ranks], error.evidence)
    if isinstance(error, OpTimeout):
        return OpTimeout(error.op, error.seq, error.waited, [members[rank] for rank in error.missing_ranks])
    return error


class _PartJournal:
    """Tells the journal of the whole for which of its ranks a part waits."""

    def __init__(self, journal: Journal, members: Sequence[int]) -> None:
        self._journal, self._members = journal, members

    def enter(self, op: str, seq: int, nbytes: int, tensors: OpTensors, detail: Any, peer: int, /) -> None: ...
    def leave(self, error: BaseException | None) -> None: ...

    def waits(self, ranks: Sequence[int], gives: Sequence[int] = (), rounds: int = 0) -> None:
        members = self._members
        self._journal.waits([members[rank] for rank in ranks], [members[rank] for rank in gives], rounds)


def _of_flat(name: str) -> Any:
    """A method that the flat transport has, too, and carries out."""

    def call(transport: HierarchicalTransport, *arguments: Any) -> Any:
        return getattr(transport._flat, name)(*arguments)

    return call


class HierarchicalTransport(Transport):
    """All ranks flat, those of this host, and this rank's rail."""

    ends_before_exit = True

    def __init__(
        self,
        context: Context,
        layout: HostLayout,
        flat: Transport,
        inner: Transport | None,
        rail: Transport | None,
        choice: Choice,
    ) -> None:
        self.rank, self.size = context.rank, context.size
        self._layout, self.choice, self.device = layout, choice, flat.device
        self._host, self._local = layout.place(context.rank)
        here = layout.hosts[self._host]
        self._flat = flat
        self._inner = None if inner is None else _Part(inner, here, context, self._ended)
        on_rail = tuple(host[self._local] for host in layout.hosts) if rail is not None else ()
        self._rail = None if rail is None else _Part(rail, on_rail, context, self._ended)
        self._parts = [part for part in (flat, inner, rail) if part is not None]
        self._cheaper: dict[tuple[str, int, int], bool] = {}

    def _ended(self) -> HoldfastError | None:
        """What has ended the whole, if a part tells it of itself."""
        return None

    # -- the cost model

    def _in_layers(self, op: str, nbytes: int, root: int = 0) -> bool:
        """Whether the hierarchy is cheaper than the flat transport; the same on every rank."""
        key = op, nbytes, root
        known = self._cheaper.get(key)
        if known is None:
            known = self._cheaper[key] = self.choice.in_layers(op, nbytes, root)
        return known

    # -- the ops with layers

    def all_reduce(self, tensor: Tensor, op: ReduceOp, deadline: float) -> None:
        layered = self._layered_op(op, tensor.dtype)
        if layered is None or not self._in_layers("all_reduce", tensor.nbytes):
            self._flat.all_reduce(tensor, op, deadline)
            return
        op, plain = layered, ReduceOp.SUM if op.name in SCALED else op
        pieces, given = self._pieces(tensor), self._pieces(prescale(tensor, op))
        own = pieces[self._local]
        if self._inner is not None:
            self._inner.run("reduce_scatter", own, given, plain, deadline)
        else:
            own.copy_(given[0])
        if self._rail is not None:
            self._rail.run("all_reduce", own, plain, deadline)
            postscale(own, op, self.size)
        if self._inner is not None:
            self._inner.run("all_gather", pieces, own, deadline)

    def broadcast(self, tensor: Tensor, src: int, deadline: float) -> None:
        if not self._in_layers("broadcast", tensor.nbytes, src):
            self._flat.broadcast(tensor, src, deadline)
            return
        source, local = self._layout.place(src)
        pieces = self._pieces(tensor)
        own = pieces[self._local]
        if self._inner is not None and self._host == source:
            self._inner.run("scatter", own, pieces if self._local == local else None, local, deadline)
        segments = self.choice.segments(tensor.nbytes)
        if self._rail is not None and segments:
            self._broadcast_on_rail(self._rail, own, source, segments, deadline)
        elif self._rail is not None:
            self._rail.run("broadcast", own, source, deadline)
        if self._inner is not None:
            self._inner.run("all_gather", pieces, own, deadline)

    def _broadcast_on_rail(self, rail: _Part, tensor: Tensor, source: int, segments: int, deadline: float) -> None:
        """The source gives each other host a share, and these exchange theirs: each byte leaves the source once.

        While the source gives the shares of one segment, the others exchange those of the segment before.
        """
        here, nothing = self._host, tensor[:0]
        others = [host for host in range(len(rail.members)) if host != source]
        parts = [segment.tensor_split(len(others)) for segment in tensor.tensor_split(segments)]
        none = [nothing] * len(others)
        for new, known in zip([*parts, none], [none, *parts], strict=True):
            given, taken = [nothing] * len(rail.members), [nothing] * len(rail.members)
            for host, to_give, to_take in zip(others, new, known, strict=True):
                if here == source:
                    given[host] = to_give
                elif host == here:
                    taken[source] = to_give
                else:
                    given[host], taken[host] = known[others.index(here)], to_take
            rail.run("all_to_all", taken, given, deadline)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        if not self._in_layers("all_gather", sum(output.nbytes for output in outputs)):
            self._flat.all_gather(outputs, tensor, deadline)
            return
        assert self._rail is not None and self._inner is not None, "hosts of one size, with several ranks"
        self._rail.run("all_gather", [outputs[rank] for rank in self._rail.members], tensor, deadline)
        for host in self._layout.hosts:
            self._inner.run("all_gather", [outputs[rank] for rank in host], outputs[host[self._local]], deadline)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, deadline: float) -> None:
        layered = self._layered_op(op, output.dtype)
        if layered is None or not self._in_layers("reduce_scatter", sum(each.nbytes for each in inputs)):
            self._flat.reduce_scatter(output, inputs, op, deadline)
            return
        assert self._rail is not None and self._inner is not None, "hosts of one size, with several ranks"
        op, plain = layered, ReduceOp.SUM if op.name in SCALED else op
        sums = []
        for host in self._layout.hosts:
            given = [prescale(inputs[rank], op) for rank in host]
            sums.append(torch.empty_like(given[self._local]))
            self._inner.run("reduce_scatter", sums[-1], given, plain, deadline)
        self._rail.run("reduce_scatter", output, sums, plain, deadline)
        postscale(output, op, self.size)

    def _layered_op(self, op: ReduceOp, dtype: torch.dtype) -> ReduceOp | None:
        """The reduction to carry out in layers for `op`; None if the flat transport has to do it.

        The layers add in `dtype`, which holds an average, but not always the sum. For CPUs the communicator has widened
        such tensors; those of a device come as they are. So narrow floats are divided before they are added.
        """
        if op.name != "avg":
            return op
        if dtype == torch.uint64:  # a device cannot divide it
            return None
        wide = accumulation_dtype(dtype, op)
        return op if wide is None else ReduceOp.premul_sum(1 / self.size) if wide == torch.float32 else None

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        """The tensor in one piece for each rail, and an empty one for each further rank of this host."""
        line, here = tensor.view(-1), len(self._layout.hosts[self._host])
        width = -(-line.numel() // self._layout.rails)
        return [line[rail * width : (rail + 1) * width] for rail in range(self._layout.rails)] + [line[:0]] * (
            here - self._layout.rails
        )

    # -- the flat ops

    reduce = _of_flat("reduce")
    all_to_all = _of_flat("all_to_all")
    all_to_all_single = _of_flat("all_to_all_single")
    gather = _of_flat("gather")
    scatter = _of_flat("scatter")
    barrier = _of_flat("barrier")
    send = _of_flat("send")
    recv = _of_flat("recv")
    batch_send_recv = _of_flat("batch_send_recv")
    window = _of_flat("window")

    def register(self, tensor: Tensor) -> str:
        return self._flat.register(tensor) if self._inner is None else self._inner.transport.register(tensor)

    # -- the end

    def abort(self, error: HoldfastError) -> None:
        for part in self._parts:
            part.interrupted = part.interrupted or self.interrupted
            part.abort(error)

    def rest(self) -> None:
        for part in self._parts:
            part.rest()

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # the others are closed, too, if one raises
            for part in self._parts:
                part.interrupted = part.interrupted or self.interrupted
                closing.callback(part.close)


class StreamedHierarchy(HierarchicalTransport):
    """The layers over transports of a device: all parts queue an op on one stream, in this order.

    An op returns before it is complete, so none meets the end of the ranks that it waits for. The flat transport
    watches all ranks: when it ends, the layers end with it, and what they have queued.
    """

    streams = True

    def __init__(self, context: Context, layout: HostLayout, flat: Transport, *others: Any) -> None:
        super().__init__(context, layout, flat, *others)
        cast(Any, flat).on_end = self._end_layers  # a `TorchGroup`

    def _ended(self) -> HoldfastError | None:
        return cast(Any, self._flat).ended  # type: ignore[no-any-return]

    def _end_layers(self, error: HoldfastError) -> None:
        for part in (self._inner, self._rail):
            if part is not None:
                part.transport.abort(error)

    def launch(self, name: str, op: Callable[[], None]) -> Work:
        return self._flat.launch(name, op)

    def settle(self, deadline: float) -> None:
        for part in self._parts:
            part.settle(deadline)


def connect(inner: str, outer: str, context: Context) -> Transport:
    """Connect the flat transport, this host's and this rank's rail, in this order on every rank.

    On one host that is the inner transport alone; on hosts with one rank each, the outer one.
    """
    if context.device.type not in registry().backend(outer).info.capabilities.moves:
        raise Unsupported(f"hier-{outer} on {context.device}", "hier-nccl is for GPUs, hier-ucx and hier-gloo for CPUs")
    layout = HostLayout.of(context.peers)
    if not layout.layered:
        only = registry().backend(inner if len(layout.hosts) == 1 else outer).info
        assert only.connect is not None
        return only.connect(replace(context, previous=None, links=only.links, hints={}))
    host, local = layout.place(context.rank)
    here, rails = layout.hosts[host], layout.rails
    with contextlib.ExitStack() as undo:

        def part(backend: str, members: Sequence[int], name: str) -> Transport:
            transport = _connect_part(backend, members, name, context)
            undo.callback(transport.close)
            return transport

        link = cost.agree(replace(context, store=dist.PrefixStore("hier-link", context.store)), _link(outer))
        flat = part(outer, range(context.size), "flat")
        within = part(inner, here, f"host{host}") if len(here) > 1 else None
        rail = part(outer, [ranks[local] for ranks in layout.hosts], f"rail{local}") if local < rails else None
        kind = StreamedHierarchy if flat.streams else HierarchicalTransport
        megabits = context.hints.get(MEGABITS.name)
        rate = None if megabits is None else megabits * 1e6 / 8
        choice = Choice(outer, layout, link, WITHIN_DEVICES if flat.streams else WITHIN, rate)
        transport = kind(context, layout, flat, within, rail, choice)
        undo.pop_all()
        return transport


def _link(outer: str) -> cost.Link:
    """The cost of a message between hosts: what the outer transport announces of TCP, measured or not."""
    info = registry().backend(outer).info
    usual = _BETWEEN if "cpu" in info.capabilities.moves else _BETWEEN_DEVICES
    return next((link for link in info.links if link.name.endswith("/tcp")), usual)


def _connect_part(backend: str, members: Sequence[int], name: str, context: Context) -> Transport:
    info = registry().backend(backend).info
    assert info.connect is not None
    try:
        return info.connect(
            replace(
                context,
                rank=list(members).index(context.rank),
                size=len(members),
                name=f"{context.name}/{name}",
                store=dist.PrefixStore(f"hier-{name}", context.store),
                peers=tuple(context.peers[rank] for rank in members),
                journal=None if context.journal is None else _PartJournal(context.journal, members),
                previous=None,
                links=info.links,
                hints={},
                connect_payload=(),
                meanwhile=lambda transport: None,
            )
        )
    except (PeerFailed, OpTimeout) as error:
        raise _renumbered(error, members) from error
