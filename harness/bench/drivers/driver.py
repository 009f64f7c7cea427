"""One driver a library: turns an op of the bench into a call without arguments.

Each driver makes the call as the library's own users would write it, with everything that can be prepared
before the timing prepared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.harness.bench.collectives.data import Array
from holdfast.harness.bench.collectives.definitions import Operation

TIMEOUT = 60.0
"""Seconds that an op may take before its library gives up."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class BoundOp:
    """An op bound to buffers. The bench times `run`, which returns when the op is done on this rank.

    `prepare` is called once the buffers are filled, before any timing; `settle` brings the result of the last `run`
    into the output buffer, for libraries that leave it elsewhere; `close` releases what binding took.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    settle: Callable[[], object] = _nothing
    close: Callable[[], None] = _nothing


class LibraryDriver(ABC):
    """One rank of one library."""

    rank: int
    ranks: int
    detail: str

    @abstractmethod
    def bind(self, operation: Operation, source: Array, target: Array) -> BoundOp:
        """A call that runs `operation` from `source` to `target`. Called by all ranks, for the same op.

        Raises NotImplementedError if the library has no such op.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.ranks

    @property
    def before(self) -> int:
        return (self.rank - 1) % self.ranks

    @property
    def partner(self) -> int | None:
        """The other rank of this rank's ping-pong; None for the last of an odd number."""
        return self.rank ^ 1 if self.rank ^ 1 < self.ranks else None

    def on_objects(
        self,
        operation: Operation,
        source: Array,
        target: Array,
        broadcast: Callable[[bytes | None, int], Any],
        all_gather: Callable[[bytes], list[Any]],
    ) -> BoundOp:
        """A call of the library's `broadcast(object, root)` or `all_gather(object)`; the object is `source`'s bytes."""
        mine, got, root = [b""], [b""], self.rank == 0

        def prepare() -> None:
            mine[0] = source.tobytes()

        def settle() -> None:
            target[:] = np.frombuffer(b"".join(got), dtype=target.dtype)

        def run_broadcast() -> None:
            got[:] = [broadcast(mine[0] if root else None, 0)]

        def run_all_gather() -> None:
            got[:] = all_gather(mine[0])

        return BoundOp(run_broadcast if operation.name == "broadcast_object" else run_all_gather, prepare, settle)

    def refuse(self, operation: Operation) -> BoundOp:
        raise NotImplementedError(f"{operation.name} is not measured on {self.detail}")


class CopyDriver(LibraryDriver):
    """No library: each rank copies memory on its own, which shows what the machine can do."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.detail = rank, ranks, f"numpy {np.__version__} copyto"

    def bind(self, operation: Operation, source: Array, target: Array) -> BoundOp:
        if operation.name != "copy":
            return self.refuse(operation)
        return BoundOp(lambda: np.copyto(target, source))

    def close(self) -> None:
        pass
