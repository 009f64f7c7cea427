"""Keep unused memory while a stopped process may still write to it.

A process that was stopped in the middle of a copy, and continues later, would write into whatever takes the place of
freed memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.backends.ucx.onesided.regions import writer_lives, writer_token
from holdfast.comms.system.signal_safety import shared_lock
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Peer

_lock = shared_lock()
_left: list[tuple[torch.Tensor, tuple[int, ...]]] = []


def free_later(memory: ExposedMemory, writers: Sequence[Peer]) -> None:
    """Move the tensor to other memory; keep the old memory until all of these processes have ended."""
    with _lock:
        _left.append((memory.vacate(), tuple(writer_token(peer) for peer in writers)))


def sweep() -> None:
    """Free the memory to which no living process can write any more."""
    with _lock:
        _left[:] = [(kept, tokens) for kept, tokens in _left if any(writer_lives(token) for token in tokens)]
