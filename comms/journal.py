"""What may be told of every op of a communicator as it runs: who records ops implements this.

Unlike the observers of `holdfast.comms.plugins.spec`, which see each op as an event object, a journal is called on the
path of the op itself, by position, and must cost well under a microsecond. Without one nothing is called.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from holdfast.comms.op_description import OpTensors

POINT_TO_POINT = frozenset(["send", "recv", "batch_send_recv"])
"""Ops that are not issued alike by all ranks."""


class Journal(Protocol):
    """Hears of the ops of one communicator: they are entered and left one at a time."""

    def enter(self, op: str, seq: int, nbytes: int, tensors: OpTensors, detail: Hashable, peer: int, /) -> None:
        """Op number `seq` begins. `detail` is what else must agree (a reduction, a tag); `peer` the root or the other
        side, -1 if there is none. Must not raise."""

    def leave(self, error: BaseException | None) -> None:
        """The op that was entered last has ended. Must not raise."""

    def waits(self, ranks: Sequence[int], gives: Sequence[int] = (), rounds: int = 0) -> None:
        """The op that runs has waited for some time, now for `ranks`, and for `gives` to take what is sent to them.

        Said again and again while it waits. `rounds` counts the rounds of messages that the op has begun. Must not
        raise.
        """


class Recorder(Protocol):
    """Makes journals."""

    def journal(self, name: str, epoch: int, rank: int, size: int, backend: str) -> Journal:
        """The journal of a new communicator."""
