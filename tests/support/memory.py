"""Shared memory as tests see it: the board of a communicator, and what the kernel reports about a mapping."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from holdfast.comms import Communicator
from holdfast.comms.algorithms.shared_memory.board import Board
from holdfast.comms.algorithms.shared_memory.direct import DirectTransport

ALL_CLASSES = (1 << 32) - 1
"""The IN_PLACE_BITS of a rank that prefers to read the inputs of every large op in place."""


def board_of(comm: Communicator) -> Board:
    """The board under a communicator of `shm` or `inproc`."""
    transport = comm._transport
    assert isinstance(transport, DirectTransport)
    return transport._board


needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="needs transparent huge pages"
)


def smaps_field(tensor: torch.Tensor, field: str) -> str:
    """A field of the mapping in /proc/self/smaps that holds a tensor."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith(f"{field}:"):
            return line.removeprefix(f"{field}:")
    raise AssertionError("no such memory")
