"""Reads a version from a store in batches of bounded size.

So a writer never has the whole of it in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch

from holdfast.store.inspection import TensorReport
from holdfast.store.weight_store import WeightStore

BATCH_BYTES = 64 << 20
"""Bytes that are read at a time; a larger tensor is a batch of its own."""
ALIGNMENT = 64

Progress = Callable[[int, int], None]
"""A callback for long work: bytes done, bytes to do."""


class VersionSource:
    """A version of a store, pinned while this context manager is open. For one thread.

    `timeout` is the limit, in seconds, for each read of the holders. Raises `NoSuchVersion`.
    """

    def __init__(
        self, store: WeightStore, version: int | Literal["latest"], timeout: float, progress: Progress | None
    ) -> None:
        self._store, self._timeout, self._progress = store, timeout, progress
        self._lease = store.pin(version)
        try:
            content = store.inspect(timeout).content(self._lease.version)
        except BaseException:
            self._lease.release()
            raise
        self.number = self._lease.version
        self.tensors, self.skeleton = content.whole_tensors(), content.skeleton
        self.nbytes = sum(each.nbytes for each in self.tensors)
        self._done = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __enter__(self) -> VersionSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._lease.release()

    def read(self, wanted: Iterable[TensorReport]) -> Iterator[tuple[TensorReport, torch.Tensor]]:
        """Each wanted tensor in its order, contiguous on the CPU; valid until the next one is asked for."""
        for batch in _batches(wanted):
            tensors = self._allocate(batch)
            self._store.get(self.number, tensors, strict=False, timeout=self._timeout)
            for each in batch:
                yield each, tensors[each.name]
                self._done += each.nbytes
                if self._progress is not None:
                    self._progress(min(self._done, self.nbytes), self.nbytes)

    def _allocate(self, batch: list[TensorReport]) -> dict[str, torch.Tensor]:
        """Tensors in one buffer, which is used again for the next batch: fresh memory is slow to touch."""
        needed = sum(_aligned(each.nbytes) for each in batch)
        if self._buffer.nbytes < needed:
            self._buffer = torch.empty(max(needed, BATCH_BYTES), dtype=torch.uint8, device="cpu")
        tensors, offset = {}, 0
        for each in batch:
            data = self._buffer[offset : offset + each.nbytes]
            tensors[each.name] = data.view(each.torch_dtype).view(each.shape)
            offset += _aligned(each.nbytes)
        return tensors


def _batches(wanted: Iterable[TensorReport]) -> Iterator[list[TensorReport]]:
    batch: list[TensorReport] = []
    taken = 0
    for each in wanted:
        if batch and taken + _aligned(each.nbytes) > BATCH_BYTES:
            yield batch
            batch, taken = [], 0
        batch.append(each)
        taken += _aligned(each.nbytes)
    if batch:
        yield batch


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
