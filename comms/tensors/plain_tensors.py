"""`PlainTensors`: names, memory, dtypes and shapes of tensors that are dense memory of the CPU, described at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from holdfast.comms._native import describe


@dataclass(frozen=True, slots=True)
class PlainTensors:
    """Tensors by name.

    Equal `forms` of equal `names` have equal dtypes and shapes. `spans` has address and size in bytes of each (64 bits
    each).
    """

    names: tuple[str, ...]
    forms: bytes
    spans: bytes

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> PlainTensors | None:
        """The description of tensors; None unless all are dense memory of the CPU, in row-major order."""
        found = describe(list(tensors.values()))
        return None if found is None else PlainTensors(tuple(tensors), found[1], found[0])

    @property
    def addresses(self) -> npt.NDArray[np.uint64]:
        return self._table()[:, 0]

    @property
    def sizes(self) -> npt.NDArray[np.uint64]:
        """The bytes of each tensor."""
        return self._table()[:, 1]

    @property
    def located(self) -> Iterator[tuple[str, int, int]]:
        """Name, address and size of each tensor."""
        return zip(self.names, self.addresses.tolist(), self.sizes.tolist(), strict=True)

    @property
    def share_memory(self) -> bool:
        """Whether two tensors have bytes in common."""
        table = self._table()
        table = table[table[:, 1] > 0]
        table = table[np.argsort(table[:, 0])]
        return bool((table[:-1].sum(axis=1, dtype=np.uint64) > table[1:, 0]).any())

    def _table(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self.spans, np.uint64).reshape(-1, 2)
