"""Memory that a process no longer uses, and must not give back: somebody who was stopped in the middle of a copy would
write into whatever takes its place, once it goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from holdfast.backends.ucx.onesided.regions import writer_lives, writer_token
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Peer

_lock = threading.Lock()
_left: list[tuple[torch.Tensor, tuple[int, ...]]] = []


def leave_behind(memory: ExposedMemory, writers: Sequence[Peer]) -> None:
    """Move its tensor to other memory; keep that which it had until all of these processes have ended."""
    with _lock:
        _left.append((memory.vacate(), tuple(writer_token(peer) for peer in writers)))


def sweep() -> None:
    """Let go of what nobody can write to any more."""
    with _lock:
        _left[:] = [(kept, tokens) for kept, tokens in _left if any(writer_lives(token) for token in tokens)]
