"""`Journal`: the callbacks that a recorder of ops (a flight recorder) implements.

Observers of `holdfast.comms.plugins.spec` get each op as an event object. A journal is instead called with positional
arguments on the op's own path, and must cost well under a microsecond.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from holdfast.comms.plan import OpTensors

POINT_TO_POINT = frozenset(["send", "recv", "batch_send_recv"])
"""Ops that not all ranks issue alike."""


class Journal(Protocol):
    """Callbacks for the ops of one communicator. Ops are entered and left one at a time."""

    def enter(self, op: str, seq: int, nbytes: int, tensors: OpTensors, detail: Hashable, peer: int, /) -> None:
        """Op number `seq` begins. Must not raise.

        `detail` is what else must agree between ranks (a reduction, a tag). `peer` is the root or the other side of a
        message, -1 if there is none.
        """

    def leave(self, error: BaseException | None) -> None:
        """The op that was entered last has ended. Must not raise."""

    def waits(self, ranks: Sequence[int], gives: Sequence[int] = (), rounds: int = 0) -> None:
        """The running op is waiting to receive from `ranks`, and for `gives` to take what it sends. Must not raise.

        Called repeatedly during a long wait. `rounds` counts the rounds of messages that the op has begun.
        """


class Recorder(Protocol):
    """Makes a journal for each communicator."""

    def journal(self, name: str, epoch: int, rank: int, size: int, backend: str) -> Journal:
        """The journal of a new communicator."""
