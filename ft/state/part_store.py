"""The parts of a sharded state that this process keeps in memory: its own, and copies of its neighbours'.

A part belongs to one version, the number of steps done. A step that is being committed adds the next version beside the
current one, and its commit removes the current one. So at every moment all ranks have one of the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.ft.state.leaves import PartLayout


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
