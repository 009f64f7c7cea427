"""The parts of a sharded state that this process keeps in memory: its own, and copies of its neighbours'.

Each is kept for one version (so many steps done). A step that is being committed puts the next version beside the
current one, and only its commit throws the current one out. So at every instant one of the two is there on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.ft.state.leaves import PartLayout


@dataclass(frozen=True, slots=True)
class Kept:
    """One part of one version: its bytes, and the description of the state that it is a part of. Not this process's
    `own`: a copy of a neighbour's.
    """

    version: int
    layout: PartLayout
    description: bytes
    buffer: torch.Tensor
    own: bool

    @property
    def key(self) -> tuple[int, int]:
        """Of how many parts, and which."""
        return self.layout.size, self.layout.part

    @property
    def share(self) -> tuple[int, int, int]:
        """Of how many parts; which of those that differ, and how many these are."""
        return self.layout.size, *self.layout.share


class Shelf:
    """Memory that is thrown out is used again, so that a step allocates nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[Kept] = []
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes, with the memory that waits to be used again."""
        return sum(kept.buffer.numel() for kept in self._kept) + sum(
            nbytes * len(buffers) for nbytes, buffers in self._spare.items()
        )

    def new(self, version: int, layout: PartLayout, description: bytes, own: bool = True) -> Kept:
        """Room for a part, which is not kept yet."""
        spare = self._spare[layout.nbytes]
        buffer = spare.pop() if spare else torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)
        return Kept(version, layout, description, buffer, own)

    def put(self, parts: Sequence[Kept]) -> None:
        """Keep `parts`, in place of those of the same version and number."""
        new = {(part.version, part.key) for part in parts}
        self._throw_out([kept for kept in self._kept if (kept.version, kept.key) in new])
        self._kept.extend(parts)

    def keep_only(self, version: int, size: int | None = None) -> None:
        """Throw out all but `version`; of another number of parts than `size` too, if that is given."""
        self._throw_out([k for k in self._kept if k.version != version or size not in (None, k.layout.size)])
        sizes = {kept.layout.nbytes for kept in self._kept}
        for nbytes in [nbytes for nbytes in self._spare if nbytes not in sizes]:
            del self._spare[nbytes]

    def of(self, version: int) -> list[Kept]:
        """What is kept of a version."""
        return [kept for kept in self._kept if kept.version == version]

    def _throw_out(self, parts: list[Kept]) -> None:
        for part in parts:
            self._kept.remove(part)
            self._spare[part.buffer.numel()].append(part.buffer)


def shifts(hosts: Sequence[str], copies: int) -> list[int]:
    """How far from each rank its copies lie: rank r's are with ranks r + shift, around the end.

    Every rank so keeps as many copies as it has. Shifts that bring copies to other hosts come first, near ones before
    far ones.
    """
    size = len(hosts)

    def on_own_host(shift: int) -> int:
        return sum(hosts[rank] == hosts[(rank + shift) % size] for rank in range(size))

    return sorted(range(1, size), key=lambda shift: (on_own_host(shift), shift))[:copies]
