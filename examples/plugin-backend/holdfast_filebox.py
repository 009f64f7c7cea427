"""The holdfast backend `filebox`: messages are files in a folder that all ranks share.

It is slow and complete. To make it a backend of your own, replace `_post_send`, `_post_recv` and `_complete`, then the
rest of the class, and describe the result in `holdfast_backends`. holdfast makes every collective of these messages.

A message is a file named after sender, receiver, tag and number. A rename makes it appear whole. Its receiver removes
it.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from holdfast.comms.algorithms.message_passing.cost import ALGORITHM
from holdfast.comms.algorithms.message_passing.exchange import Posted
from holdfast.comms.algorithms.message_passing.messages import MessageTransport
from holdfast.comms.arithmetic import REDUCIBLE
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked
from holdfast.comms.plugins.hints import Hint
from holdfast.comms.plugins.spec import Available, BackendInfo, Capabilities, Unavailable, hookimpl
from holdfast.comms.rendezvous import fetch
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context, Link
from holdfast.comms.transport.liveness import Liveness

_SHORTEST_PAUSE = 0.0001
PAUSE = Hint("longest_pause", float, "seconds between two looks of a rank that waits", 0.002, least=0.0001, most=1.0)


@dataclass(frozen=True, slots=True)
class Message:
    """A message that `src` will write to the file `path`, and that is read into `tensor`."""

    tensor: torch.Tensor
    src: int
    path: Path


class FileboxTransport(MessageTransport):
    """One rank of a communicator."""

    def __init__(self, context: Context, folder: Path) -> None:
        super().__init__(context, context.link("filebox"))
        self._longest_pause = context.hints.get(PAUSE.name, PAUSE.default)
        self._folder, self._epoch = folder, context.epoch
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()
        self._error: HoldfastError | None = None
        self._left = False
        self._liveness = Liveness(context.peers, context.rank)

    # -- messages: contiguous CPU tensors of the announced dtypes, one op at a time

    def _post_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Posted:
        """Write the file. The message is complete for the sender at once: None."""
        self._check()
        draft = self._folder / f"draft-{self.rank}"
        draft.write_bytes(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b"")
        draft.rename(self._folder / f"{self.rank}-{dst}-{tag}-{self._sent[dst, tag]}")
        self._sent[dst, tag] += 1
        return None

    def _post_recv(self, tensor: torch.Tensor, src: int, tag: int) -> Posted:
        """Note the file to wait for. Messages of one source and tag arrive in order, hence the number."""
        self._check()
        path = self._folder / f"{src}-{self.rank}-{tag}-{self._received[src, tag]}"
        self._received[src, tag] += 1
        return Message(tensor, src, path)

    def _complete(self, posted: Sequence[Posted], deadline: float, op: str, seq: int) -> None:
        """Wait for all of `posted`, until a peer has ended, `abort` is called or the deadline has passed."""
        waiting = [cast(Message, each) for each in posted if each is not None]
        began, pause = time.monotonic(), _SHORTEST_PAUSE
        while waiting := [each for each in waiting if not self._receive(each)]:
            self._check()
            sources = sorted({each.src for each in waiting})
            self._raise_for_ended_peers(waiting, sources)
            if time.monotonic() > deadline:
                raise OpTimeout(op, seq, time.monotonic() - began, sources)
            time.sleep(pause)
            pause = min(2 * pause, self._longest_pause)

    def _receive(self, message: Message) -> bool:
        """Read the message into its tensor if it is there; return whether it was."""
        try:
            data = message.path.read_bytes()
        except FileNotFoundError:
            return False
        message.path.unlink()
        if len(data) != message.tensor.nbytes:
            raise Mismatch(f"rank {message.src} sent {len(data)} bytes, not {message.tensor.nbytes}")
        ctypes.memmove(message.tensor.data_ptr(), data, len(data))
        return True

    # -- the end: of peers, and of this rank

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.again()

    def _raise_for_ended_peers(self, waiting: Sequence[Message], sources: Sequence[int]) -> None:
        """Raise if a message can never come. A farewell follows the last message, so read farewells before messages."""
        farewells = {rank: self._farewell(rank) for rank in sources}
        dead = [rank for rank in self._liveness.dead() if not self._farewell(rank)]
        if any(each.path.exists() for each in waiting):
            return
        if dead:
            raise PeerFailed(dead, "the kernel says that the process is gone")
        for rank, why in farewells.items():
            if why.startswith("aborted"):
                raise Revoked(self._epoch, f"rank {rank} {why}")
            if why:
                raise PeerFailed((rank,), f"it left the communicator: {why}")

    def _farewell(self, rank: int) -> str:
        """Why `rank` left; "" if it did not, or if all have and the folder is gone."""
        with suppress(FileNotFoundError):
            return (self._folder / f"left-{rank}").read_text()
        return ""

    def _leave(self, why: str) -> None:
        if not self._left:
            self._left = True
            draft = self._folder / f"farewell-{self.rank}"
            with suppress(FileNotFoundError):  # another thread of this rank renamed it first
                draft.write_text(why)
                draft.rename(self._folder / f"left-{self.rank}")

    def abort(self, error: HoldfastError) -> None:
        """End the running op and all later ones with `error`, and tell the peers. From any thread."""
        self._error = self._error or error
        self._leave(f"aborted: {error}")

    def close(self) -> None:
        """Say farewell and release the pidfds. The last rank to leave removes the folder."""
        self._leave("closed")
        dead = self._liveness.dead()
        if all(rank in dead or self._farewell(rank) for rank in range(self.size)):
            shutil.rmtree(self._folder, ignore_errors=True)
        self._liveness.close()


def connect(context: Context) -> FileboxTransport:
    """Make this rank's transport; collective. Rank 0 makes the folder and tells the others its name."""
    if context.rank == 0:
        context.store.set("folder", tempfile.mkdtemp(prefix="holdfast-filebox-"))
    with closing(Liveness(context.peers, context.rank, context.over)) as liveness:
        folder = fetch(context.store, "folder", context.deadline, liveness).decode()
    return FileboxTransport(context, Path(folder))


def probe() -> Available | Unavailable:
    """Whether it can run here. Import heavy libraries in here; for one that is missing say what to install."""
    return Available()


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    capabilities = Capabilities(reduces={"cpu": names(REDUCIBLE)}, moves={"cpu": names(DTYPES)}, one_host=True)
    return [
        BackendInfo(
            "filebox",
            (1, 1),
            "files in a shared folder",
            capabilities,
            probe,
            connect,
            links=(Link(latency=200e-6, bandwidth=1e9, name="filebox"),),
            hints=(ALGORITHM, PAUSE),
        )
    ]
