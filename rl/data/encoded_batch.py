"""`EncodedBatch`: a batch as bytes, which the driver makes once for all trainers, spares included."""

from __future__ import annotations

from typing import Self

import msgspec

from holdfast.rl.data.batch_columns import BatchColumns
from holdfast.rl.data.buffer_state import BufferState
from holdfast.rl.data.replay_buffer import Batch


class EncodedBatch(msgspec.Struct, frozen=True):
    """A batch that begins with update `step`.

    `after` is the state of the replay buffer after it as JSON, and decoded only by a run that goes on. It is empty
    unless a checkpoint is written after this batch: the state has every group that waits.
    """

    step: int
    columns: BatchColumns
    after: bytes = b""

    @classmethod
    def of(cls, batch: Batch, *, saved: bool = True) -> Self:
        """Encode a batch; `saved`: with the state of the replay buffer after it."""
        return cls(batch.step, BatchColumns.of(batch.groups), msgspec.json.encode(batch.after) if saved else b"")


def decode_state(after: bytes) -> BufferState:
    """The state of the replay buffer that `EncodedBatch.after` holds."""
    return msgspec.json.decode(after, type=BufferState)
