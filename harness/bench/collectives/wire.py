"""The messages between the bench and its worker processes, over a `MessageSocket`.

A worker sleeps in `receive`, so it burns no CPU while it is another library's turn.
"""

from __future__ import annotations

import msgspec


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """A worker is ready.

    `cpus` are those it may run on; `detail` names the library's version and transport.
    """

    key: str
    rank: int
    pid: int
    cpus: tuple[int, ...]
    detail: str


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Run an op: `singles` times alone, then `blocks` times `block` in a row, with `c` elements in a block.

    `fresh`: each rank writes its input anew before each op, within the timing.
    """

    op: str
    c: int
    dtype: str
    seed: int
    singles: int
    blocks: int
    block: int
    fresh: bool = False


class Measurement(msgspec.Struct, frozen=True, tag=True):
    """Entry and exit of each timing (CLOCK_MONOTONIC, ns), and how many elements were wrong (None: unknown)."""

    singles: list[tuple[int, int]]
    blocks: list[tuple[int, int]]
    wrong: int | None


class MeasurementFailed(msgspec.Struct, frozen=True, tag=True):
    """The op raised. `unmeasured`: the library has no such op, and nothing was tried."""

    text: str
    unmeasured: bool = False


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    """Close and exit."""


Message = WorkerReady | Measure | Measurement | MeasurementFailed | StopWorker
DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
