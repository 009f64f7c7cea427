"""The board under a communicator of `shm` or `inproc`, for tests that look at what ranks say there."""

from __future__ import annotations

from holdfast.comms import Communicator
from holdfast.comms.algorithms.shared_memory.board import Board
from holdfast.comms.algorithms.shared_memory.direct import DirectTransport

ALL_SORTS = (1 << 32) - 1
"""Of large ops: what a rank says in WANTED that would rather read every input where it is."""


def board_of(comm: Communicator) -> Board:
    transport = comm._transport
    assert isinstance(transport, DirectTransport)
    return transport._board
