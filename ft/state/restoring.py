"""Keeps parts of a sharded state in memory, and restores it for another number or layout of ranks.

A process keeps its own part, and copies of its neighbours'. A part belongs to one version, the number of steps done. A
step that is being committed adds the next version beside the current one, and its commit removes the current one. So at
every moment all ranks have one of the two.

To restore, all ranks exchange what they have. If every part of the state, or a replica of it, is somewhere, each rank
computes which bytes its new part consists of, takes those that it has itself, and reads the others from ranks that have
them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import UNDECODABLE, CorruptData, Unsupported
from holdfast.comms.memory_plane import Handle, MemoryPlane
from holdfast.ft.state.boxes import Box, cover, stretch, within
from holdfast.ft.state.fetching import BLOCK, Block, Fetch, Fetched, Source, blocks_of, digest
from holdfast.ft.state.leaves import Leaf, PartLayout, RankMesh, holders_of_boxes


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of one version: its bytes in `buffer`, and the description of the whole state.

    `own` is False for a copy of a neighbour's part.
    """

    version: int
    layout: PartLayout
    description: bytes
    buffer: torch.Tensor
    own: bool

    @property
    def key(self) -> tuple[int, int]:
        """(number of parts, number of this part)."""
        return self.layout.size, self.layout.part

    @property
    def share(self) -> tuple[int, int, int]:
        """(number of parts, number of this part among those that differ, how many differ)."""
        return self.layout.size, *self.layout.share


class PartStore:
    """The stored parts of one process. Memory of removed parts is reused, so that a step allocates none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[StoredPart] = []
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept parts and of the memory for reuse."""
        return sum(kept.buffer.numel() for kept in self._kept) + sum(
            nbytes * len(buffers) for nbytes, buffers in self._spare.items()
        )

    def new(self, version: int, layout: PartLayout, description: bytes, own: bool = True) -> StoredPart:
        """A part with memory of its own, which `put` keeps."""
        spare = self._spare[layout.nbytes]
        buffer = spare.pop() if spare else torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)
        return StoredPart(version, layout, description, buffer, own)

    def put(self, parts: Sequence[StoredPart]) -> None:
        """Keep `parts`, in place of parts of the same version and number."""
        new = {(part.version, part.key) for part in parts}
        self._throw_out([kept for kept in self._kept if (kept.version, kept.key) in new])
        self._kept.extend(parts)

    def keep_only(self, version: int, size: int | None = None) -> None:
        """Remove all versions but `version`, and parts of layouts with another number of parts than `size`."""
        self._throw_out([k for k in self._kept if k.version != version or size not in (None, k.layout.size)])
        sizes = {kept.layout.nbytes for kept in self._kept}
        for nbytes in [nbytes for nbytes in self._spare if nbytes not in sizes]:
            del self._spare[nbytes]

    def of(self, version: int) -> list[StoredPart]:
        """The kept parts of a version."""
        return [kept for kept in self._kept if kept.version == version]

    def _throw_out(self, parts: list[StoredPart]) -> None:
        for part in parts:
            self._kept.remove(part)
            self._spare[part.buffer.numel()].append(part.buffer)


def shifts(hosts: Sequence[str], copies: int) -> list[int]:
    """The distances from each rank to the ranks with its copies.

    The copies of rank r are at r + shift, modulo the number of ranks, so every rank keeps as many copies for others as
    others keep for it. Shifts to other hosts come first, near shifts before far ones.
    """
    size = len(hosts)

    def on_own_host(shift: int) -> int:
        return sum(hosts[rank] == hosts[(rank + shift) % size] for rank in range(size))

    return sorted(range(1, size), key=lambda shift: (on_own_host(shift), shift))[:copies]


class Holding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One part that a rank has: part `part` of `size`, its region, and the checksums of its blocks."""

    size: int
    part: int
    handle: Handle
    digests: list[bytes]


class StateDescription(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The leaves of a state, the mesh of its ranks, and its description: the same for all its parts."""

    leaves: tuple[Leaf, ...]
    mesh: RankMesh
    description: bytes


_encode = msgspec.msgpack.Encoder().encode
_holdings = msgspec.msgpack.Decoder(list[Holding])
_state = msgspec.msgpack.Decoder(StateDescription)
T = TypeVar("T")


def _decoded(decoder: msgspec.msgpack.Decoder[T], raw: bytes) -> T:
    try:
        return decoder.decode(raw)
    except UNDECODABLE as error:
        raise CorruptData(f"what a rank says of the state that it keeps cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class RestoredPart:
    """This rank's new part of the state: its `layout` and `tensors`.

    `parts` are the numbers of the old parts that it was made of; `fetched` says what came from other ranks."""

    description: bytes
    layout: PartLayout
    tensors: list[torch.Tensor]
    parts: frozenset[int]
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class BoxSource:
    """A source of elements of one leaf: old part `part` has `box`."""

    part: int
    box: Box


def complete_size(held: Sequence[Sequence[tuple[int, int, int]]], size: int) -> int | None:
    """The number of parts of a state that the ranks can restore completely; None if each state lacks a part.

    `held` lists each rank's parts as (number of parts, number among those that differ, how many differ). If several
    states are complete, the one of `size` parts is preferred, else the one with the most.
    """
    shares: defaultdict[int, set[int]] = defaultdict(set)
    needed: dict[int, int] = {}
    for rank in held:
        for of, number, count in rank:
            shares[of].add(number)
            needed[of] = count
    complete = [of for of, there in shares.items() if len(there) == needed[of]]
    return size if size in complete else max(complete, default=None)


def restore(
    comm: Communicator,
    plane: MemoryPlane | None,
    kept: Sequence[StoredPart],
    size: int,
    mesh: RankMesh,
    fetch: Fetch,
    patience: float,
) -> RestoredPart:
    """This rank's part, for ranks laid out as `mesh`, of the state that was cut into `size` parts; collective.

    `kept` are the parts that this rank has. Raises `CorruptData` for parts that do not fit together, `Unsupported` if
    bytes of other ranks are needed and no `plane` reaches them; else what `fetch` raises.
    """
    mine = [part for part in kept if part.layout.size == size]
    with contextlib.ExitStack() as exposed:
        said = _encode([_expose(part, plane, exposed) for part in mine] if plane is not None else [])
        offers = [_decoded(_holdings, raw) for raw in comm.all_gather_object(said)]
        having = comm.all_gather_object([part.layout.part for part in mine])
        first = next(rank for rank, parts in enumerate(having) if parts)
        told = (
            _encode(StateDescription(mine[0].layout.leaves, mine[0].layout.mesh, mine[0].description)) if mine else b""
        )
        state = _decoded(_state, comm.broadcast_object(told, first))
        layout = PartLayout(state.leaves, mesh, comm.rank)
        buffers = {part.layout.part: part.buffer for part in mine}
        pieces = choose(layout, state.mesh, buffers.keys(), {part for parts in having for part in parts})
        needs = needed(layout, state.mesh, pieces)
        if plane is None and not needs.keys() <= buffers.keys():
            raise Unsupported("reading state that other ranks keep", "no memory plane reaches them")
        blocks = []
        for part in sorted(needs.keys() - buffers.keys()):
            buffers[part] = torch.empty(
                PartLayout(state.leaves, state.mesh, part).nbytes, dtype=torch.uint8, device="cpu"
            )
            blocks += _blocks(part, buffers[part], needs[part], offers)
        fetched = Fetched()
        if plane is not None:
            fetched = fetch(plane, blocks)
        tensors = assemble(layout, state.mesh, pieces, buffers)
        comm.barrier(timeout=patience)
    return RestoredPart(state.description, layout, tensors, frozenset(needs), fetched)


def choose(layout: PartLayout, old: RankMesh, mine: Collection[int], there: Collection[int]) -> list[list[BoxSource]]:
    """For each leaf, the sources of the boxes that make up the new part `layout`.

    Sources are the parts that are `there`, of ranks that were laid out as `old`; parts of this rank (`mine`) are
    preferred, in their order. Raises `CorruptData` for a leaf of which a box is nowhere.
    """
    found = []
    for leaf, wanted in zip(layout.leaves, layout.boxes, strict=True):
        holders = holders_of_boxes(leaf.shape, leaf.cuts, old)
        having = {box: [part for part in parts if part in there] for box, parts in holders.items()}
        having = {box: parts for box, parts in having.items() if parts}
        boxes = list(having)
        taken, nowhere = cover(wanted, boxes)
        if nowhere:
            raise CorruptData(f"nobody has {list(nowhere[0])} of {leaf.path}")
        pieces = []
        for position, box in taken:
            parts = having[boxes[position]]
            own = next((part for part in mine if part in parts), None)
            pieces.append(BoxSource(parts[layout.part % len(parts)] if own is None else own, box))
        found.append(pieces)
    return found


def needed(
    layout: PartLayout, old: RankMesh, pieces: Sequence[Sequence[BoxSource]]
) -> dict[int, list[tuple[int, int]]]:
    """The byte ranges of old parts that these pieces of the leaves need: (begin, end) by part, ascending."""
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    olds = {piece.part: PartLayout(layout.leaves, old, piece.part) for leaf in pieces for piece in leaf}
    for index, leaf in enumerate(layout.leaves):
        for piece in pieces[index]:
            layout_there = olds[piece.part]
            begin, end = stretch(piece.box, layout_there.boxes[index])
            at, width = layout_there.offsets[index], leaf.torch_dtype.itemsize
            found[piece.part].append((at + begin * width, at + end * width))
    return dict(found)


def assemble(
    layout: PartLayout, old: RankMesh, pieces: Sequence[Sequence[BoxSource]], buffers: dict[int, torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors of the new part `layout`, from their `pieces` in the bytes of the old parts (`buffers`)."""
    olds = {part: PartLayout(layout.leaves, old, part) for part in buffers}
    found = []
    for index, leaf in enumerate(layout.leaves):
        tensor = torch.empty(layout.shapes[index], dtype=leaf.torch_dtype, device="cpu")
        for piece in pieces[index]:
            source = olds[piece.part].view(buffers[piece.part], index)
            _cut(tensor, piece.box, layout.boxes[index]).copy_(_cut(source, piece.box, olds[piece.part].boxes[index]))
        found.append(tensor)
    return found


def _cut(tensor: torch.Tensor, part: Box, box: Box) -> torch.Tensor:
    """The view of box `part` in a tensor that holds `box` of a leaf."""
    for dim, (low, high) in enumerate(within(part, box)):
        tensor = tensor.narrow(dim, low, high - low)
    return tensor


def _expose(part: StoredPart, plane: MemoryPlane, exposed: contextlib.ExitStack) -> Holding:
    buffer = part.buffer.cpu()
    region = exposed.enter_context(plane.expose(buffer))
    return Holding(part.layout.size, part.layout.part, region.handle, [digest(block) for block in blocks_of(buffer)])


def _blocks(
    part: int, buffer: torch.Tensor, ranges: Sequence[tuple[int, int]], offers: Sequence[Sequence[Holding]]
) -> list[Block]:
    """The blocks to read for these byte ranges of a part.

    Ranks may differ in a block (memory goes bad): the checksum of most ranks is right, in a tie the first."""
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
