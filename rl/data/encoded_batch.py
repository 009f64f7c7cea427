"""`EncodedBatch`: a batch as bytes, which the driver makes once for all trainers, spares included."""

from __future__ import annotations

from typing import Self

import msgspec

from holdfast.rl.data.buffer_state import BufferState
from holdfast.rl.data.episode import Group
from holdfast.rl.data.replay_buffer import Batch

_encode = msgspec.msgpack.encode
_groups = msgspec.msgpack.Decoder(tuple[Group, ...])


class EncodedBatch(msgspec.Struct, frozen=True):
    """A batch that begins with update `step`.

    A trainer decodes the groups when it trains on them. `after` is JSON, and decoded only by a run that goes on.
    """

    step: int
    packed_groups: bytes
    after: bytes

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Encode a batch."""
        return cls(batch.step, _encode(batch.groups), msgspec.json.encode(batch.after))

    def groups(self) -> tuple[Group, ...]:
        """Decode the groups."""
        return _groups.decode(self.packed_groups)


def decode_state(after: bytes) -> BufferState:
    """The state of the replay buffer that `EncodedBatch.after` holds."""
    return msgspec.json.decode(after, type=BufferState)
