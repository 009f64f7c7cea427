"""`filebox`: a holdfast backend over files in a folder that all ranks share. Slow, complete, and short enough to read.

A message is a file named after sender, receiver, tag and number. It appears whole, by a rename, and is removed by who
read it. holdfast makes every collective of such messages; this file moves them, and tells of ends.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from holdfast.comms.algorithms.message_passing.cost import Link
from holdfast.comms.algorithms.message_passing.exchange import Posted
from holdfast.comms.algorithms.message_passing.messages import MessageTransport
from holdfast.comms.arithmetic import REDUCIBLE
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked
from holdfast.comms.plugins.spec import Available, BackendInfo, Capabilities, hookimpl
from holdfast.comms.rendezvous import fetch
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import Liveness

_SHORTEST_NAP, _LONGEST_NAP = 0.0001, 0.002  # seconds


@dataclass(frozen=True, slots=True)
class Message:
    """A message that is to come from `src`, as the file `path`, into `tensor`."""

    tensor: torch.Tensor
    src: int
    path: Path


class FileboxTransport(MessageTransport):
    """One rank's view of the folder."""

    def __init__(self, context: Context, folder: Path) -> None:
        super().__init__(context, Link(latency=200e-6, bandwidth=1e9))
        self._folder, self._epoch = folder, context.epoch
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()
        self._error: HoldfastError | None = None
        self._left = False
        self._liveness = Liveness(context.peers, context.rank)

    def _post_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Posted:
        """Write the file: the message is complete, for the sender, at once."""
        self._check()
        draft = self._folder / f"draft-{self.rank}"
        draft.write_bytes(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b"")
        draft.rename(self._folder / f"{self.rank}-{dst}-{tag}-{self._sent[dst, tag]}")
        self._sent[dst, tag] += 1
        return None

    def _post_recv(self, tensor: torch.Tensor, src: int, tag: int) -> Posted:
        self._check()
        path = self._folder / f"{src}-{self.rank}-{tag}-{self._received[src, tag]}"
        self._received[src, tag] += 1
        return Message(tensor, src, path)

    def _complete(self, posted: Sequence[Posted], deadline: float, op: str, seq: int) -> None:
        waiting = [cast(Message, each) for each in posted if each is not None]
        began, nap = time.monotonic(), _SHORTEST_NAP
        while waiting := [each for each in waiting if not self._taken(each)]:
            self._check()
            self._look_for_ends(waiting, sources := sorted({each.src for each in waiting}))
            if time.monotonic() > deadline:
                raise OpTimeout(op, seq, time.monotonic() - began, sources)
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def _taken(self, message: Message) -> bool:
        """Read the message into its tensor if it is there."""
        try:
            data = message.path.read_bytes()
        except FileNotFoundError:
            return False
        message.path.unlink()
        if len(data) != message.tensor.nbytes:
            raise Mismatch(f"rank {message.src} sent {len(data)} bytes, not {message.tensor.nbytes}")
        ctypes.memmove(message.tensor.data_ptr(), data, len(data))
        return True

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.again()

    def _look_for_ends(self, waiting: Sequence[Message], sources: Sequence[int]) -> None:
        """Raise if a message can never come. A farewell is written after the last message: look in this order."""
        left = {rank: self._farewell(rank) for rank in sources}
        dead = [rank for rank in self._liveness.dead() if not self._farewell(rank)]
        if any(each.path.exists() for each in waiting):
            return
        if dead:
            raise PeerFailed(dead, "the kernel says that the process is gone")
        for rank, why in left.items():
            if why.startswith("aborted"):
                raise Revoked(self._epoch, f"rank {rank} {why}")
            if why:
                raise PeerFailed((rank,), f"it left the communicator: {why}")

    def _farewell(self, rank: int) -> str:
        with suppress(FileNotFoundError):  # it has not left, or all have, and the last one has removed the folder
            return (self._folder / f"left-{rank}").read_text()
        return ""

    def _leave(self, why: str) -> None:
        if not self._left:
            self._left = True
            draft = self._folder / f"farewell-{self.rank}"
            with suppress(FileNotFoundError):  # another thread of this rank was quicker
                draft.write_text(why)
                draft.rename(self._folder / f"left-{self.rank}")

    def abort(self, error: HoldfastError) -> None:
        self._error = self._error or error
        self._leave(f"aborted: {error}")

    def close(self) -> None:
        """Say farewell; the last to leave removes the folder."""
        self._leave("closed")
        dead = self._liveness.dead()
        if all(rank in dead or self._farewell(rank) for rank in range(self.size)):
            shutil.rmtree(self._folder, ignore_errors=True)
        self._liveness.close()


def connect(context: Context) -> FileboxTransport:
    """Share the folder that rank 0 makes."""
    if context.rank == 0:
        context.store.set("folder", tempfile.mkdtemp(prefix="holdfast-filebox-"))
    return FileboxTransport(context, Path(fetch(context.store, "folder", context.deadline).decode()))


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    capabilities = Capabilities(reduces={"cpu": names(REDUCIBLE)}, moves={"cpu": names(DTYPES)}, one_host=True)
    return [BackendInfo("filebox", (1, 0), "files in a shared folder", capabilities, Available, connect)]
