"""A sharded state put together from what the ranks of an epoch have kept of it, whoever died, into as many parts as
there are ranks now.

All say what they have. If every part of the state is somewhere, each rank works out which bytes its new part consists
of, takes those that it has itself, and reads the others from the ranks that have them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import CorruptData, HoldfastError, Unsupported
from holdfast.comms.plane import Handle, MemoryPlane
from holdfast.ft.copies.fetching import BLOCK, Block, Fetched, Fetcher, Source, blocks_of, digest
from holdfast.ft.copies.leaves import Layout, Leaf
from holdfast.ft.copies.shelf import Kept


class Holding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One part that a rank has, and where."""

    size: int
    part: int
    handle: Handle
    digests: list[bytes]


class State(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a state consists of, the same for all its parts."""

    leaves: tuple[Leaf, ...]
    description: bytes


_encode = msgspec.msgpack.Encoder().encode
_holdings = msgspec.msgpack.Decoder(list[Holding])
_state = msgspec.msgpack.Decoder(State)


@dataclass(frozen=True, slots=True)
class Restored:
    """This rank's new part of the state: its `layout` and tensors; the old `parts` that it was made of. `fetched` says
    what came from others."""

    description: bytes
    layout: Layout
    tensors: list[torch.Tensor]
    parts: frozenset[int]
    fetched: Fetched


def complete_size(held: Sequence[Sequence[tuple[int, int]]], size: int) -> int | None:
    """Into how many parts the state is cut that the ranks can put together of what they have (each rank's are given as
    (of how many, which)); that of `size` if there are several; None if a part is missing.
    """
    parts: defaultdict[int, set[int]] = defaultdict(set)
    for rank in held:
        for of, part in rank:
            parts[of].add(part)
    whole = [of for of, there in parts.items() if len(there) == of]
    return size if size in whole else max(whole, default=None)


def restore(
    comm: Communicator,
    plane: MemoryPlane | None,
    kept: Sequence[Kept],
    size: int,
    fetcher: Fetcher,
    *,
    timeout: float,
    patience: float,
    over: Callable[[], HoldfastError | None],
    before_chunk: Callable[[], None],
) -> Restored:
    """This rank's part, of as many as there are ranks, of the state that is cut into `size` parts; collective.

    `kept` is what this rank has of it. Raises `CorruptData` for what does not fit together, `Unsupported` if bytes of
    others are needed and no `plane` reaches them; else what `Fetcher.fetch` raises.
    """
    mine = [part for part in kept if part.layout.size == size]
    with contextlib.ExitStack() as exposed:
        said = _encode([_expose(part, plane, exposed) for part in mine] if plane is not None else [])
        offers = [_holdings.decode(raw) for raw in comm.all_gather_object(said)]
        having = comm.all_gather_object(bool(mine))
        told = _encode(State(mine[0].layout.leaves, mine[0].description)) if mine else b""
        state = _state.decode(comm.broadcast_object(told, having.index(True)))
        layout = Layout(state.leaves, comm.size, comm.rank)
        needs = needed(layout, size)
        buffers = {part.layout.part: part.buffer for part in mine}
        for part in needs:
            if part not in buffers and plane is None:
                raise Unsupported("reading state that other ranks keep", "no memory plane reaches them")
        blocks = []
        for part in sorted(needs.keys() - buffers.keys()):
            buffers[part] = torch.empty(Layout(state.leaves, size, part).nbytes, dtype=torch.uint8)
            blocks += _blocks(part, buffers[part], needs[part], offers)
        fetched = Fetched()
        if plane is not None:
            fetched = fetcher.fetch(plane, blocks, timeout=timeout, over=over, before=before_chunk)
        tensors = assemble(layout, size, buffers)
        comm.barrier(timeout=patience)
    return Restored(state.description, layout, tensors, frozenset(needs), fetched)


def needed(layout: Layout, size: int) -> dict[int, list[tuple[int, int]]]:
    """Which bytes of which old parts (of `size`) the new part `layout` consists of: (begin, end) by part, ascending."""
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    olds = [Layout(layout.leaves, size, part) for part in range(size)]
    for index, leaf in enumerate(layout.leaves):
        if leaf.dim < 0:
            old = olds[layout.part % size]
            found[old.part].append((old.offsets[index], old.offsets[index + 1]))
            continue
        low, high = leaf.rows(layout.size, layout.part)
        for old in olds:
            first, last = leaf.rows(size, old.part)
            begin, end = max(low, first), min(high, last)
            if begin >= end:
                continue
            at, after = old.offsets[index], old.offsets[index + 1]
            if leaf.dim == 0:
                row = old.view(_nothing(old.nbytes), index).stride(0) * leaf.torch_dtype.itemsize
                at, after = at + (begin - first) * row, at + (end - first) * row
            found[old.part].append((at, after))
    return {part: [(a, b) for a, b in ranges if b > a] for part, ranges in found.items()}


def assemble(layout: Layout, size: int, buffers: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of the new part `layout`, from the bytes of those of the `size` old parts that it needs."""
    olds = {part: Layout(layout.leaves, size, part) for part in buffers}
    found = []
    for index, leaf in enumerate(layout.leaves):
        if leaf.dim < 0:
            part = layout.part % size
            found.append(olds[part].view(buffers[part], index).clone())
            continue
        low, high = leaf.rows(layout.size, layout.part)
        pieces = []
        for part in range(size):
            first, last = leaf.rows(size, part)
            begin, end = max(low, first), min(high, last)
            if begin < end:
                pieces.append(olds[part].view(buffers[part], index).narrow(leaf.dim, begin - first, end - begin))
        empty = torch.empty(layout.shapes[index], dtype=leaf.torch_dtype)
        found.append(torch.cat(pieces, leaf.dim) if pieces else empty)
    return found


def _nothing(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def _expose(part: Kept, plane: MemoryPlane, exposed: contextlib.ExitStack) -> Holding:
    buffer = part.buffer.cpu()
    region = exposed.enter_context(plane.expose(buffer))
    return Holding(part.layout.size, part.layout.part, region.handle, [digest(block) for block in blocks_of(buffer)])


def _blocks(
    part: int, buffer: torch.Tensor, ranges: Sequence[tuple[int, int]], offers: Sequence[Sequence[Holding]]
) -> list[Block]:
    """What has to be read for these ranges of a part. Those who have it may differ in what they have (memory goes bad):
    what most have is right, the first of them in doubt."""
    holders = [(rank, held) for rank, offer in enumerate(offers) for held in offer if held.part == part]
    fit = [(rank, held) for rank, held in holders if held.handle.nbytes == buffer.numel()]
    if not fit:
        raise CorruptData(f"nobody has a part {part} of {buffer.numel()} bytes")
    wanted = sorted({number for begin, end in ranges for number in range(begin // BLOCK, -(-end // BLOCK))})
    pieces = blocks_of(buffer)
    blocks = []
    for number in wanted:
        digests = [held.digests[number] for _, held in fit]
        right = max(digests, key=digests.count)
        sources = [Source(rank, held.handle, number * BLOCK) for rank, held in fit if held.digests[number] == right]
        blocks.append(Block(right, pieces[number], tuple(sources)))
    return blocks
