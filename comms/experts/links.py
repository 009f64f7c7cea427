"""How frames pass between two ranks of a switch: through a window that reaches memory directly, else as messages.

Each pair of ranks stands alone: the end of one is reported by the links to it, and disturbs no other. Frames from one
rank arrive in the order in which it sent them.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import permutations

import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, RegionGone, Revoked, Unsupported
from holdfast.comms.ops import Send
from holdfast.comms.plugins.registry import registry
from holdfast.comms.work import Work

Tensor = torch.Tensor

OUT, BACK, REPORT, DECISION, ABORT = range(5)
"""The kinds of frames: rows to experts, rows back, and what `MaskAgreement` sends; or that the switch is over."""

_FENCED = -1
_PENDING_SECONDS = 3600.0
"""How long a message may wait for a peer that computes. The peer's own waits end much earlier."""
_LEAVE_SECONDS = 0.2
_PAYLOAD = 1
"""The tag of payloads."""


class LinkGone(Exception):
    """The rank at the other end has ended, left or been fenced: it takes part in no later step."""


class ExpertLinks(ABC):
    """The links of one rank to the others. A frame is a tensor of int64: a head of fixed size, then a payload."""

    @abstractmethod
    def frame(self, rank: int, kind: int, words: int) -> Tensor:
        """Memory for a frame to `rank`: fill it and send it, before the next one is asked for."""

    @abstractmethod
    def send(self, rank: int, kind: int, frame: Tensor, timeout: float) -> None:
        """Send a frame. Raises `LinkGone`, `OpTimeout`."""

    @abstractmethod
    def receive(self, rank: int, kind: int, timeout: float) -> Tensor:
        """Wait for the next frame of `rank`, which is of this kind. Raises `LinkGone`, `OpTimeout`.

        The frame is valid until that rank has been sent the report of the step. Raises `Revoked` if the rank aborted.
        """

    @abstractmethod
    def abort(self, rank: int) -> None:
        """Make the waits of `rank` for this rank raise `Revoked`, as far as it can be reached."""

    @abstractmethod
    def close(self) -> None:
        """Leave: the others' links to this rank raise `LinkGone`."""

    def commit(self, step: int) -> bool:
        """Record that this rank has decided `step`; False if it was fenced before."""
        return True

    def fence(self, rank: int, step: int) -> bool:
        """Exclude a silent rank unless it has decided `step`; whether it is excluded now."""
        raise NotImplementedError

    def is_fenced(self, rank: int) -> bool:
        """Whether a rank has fenced `rank`."""
        return False


def open_links(comm: Communicator, head: int, payload: int, fences: bool, timeout: float) -> ExpertLinks:
    """Open links for frames of `head` words and up to `payload` more; collective."""
    if registry().backends[comm.backend].capabilities.windows:
        links = WindowLinks(comm, head, payload, fences, timeout)
        if links.mapped:
            return links
        links.close()
    if fences:
        raise Unsupported(
            f"silence='mask' over this {comm.backend!r}",
            "a stopped rank cannot be fenced there, and might go on alone later; use silence='raise', or a backend "
            "that maps windows between processes of one host (`holdfast backends`)",
        )
    return MessageLinks(comm, head, payload, timeout)


class WindowLinks(ExpertLinks):
    """Each rank exposes, for each other one, a slot a kind of frame. A frame is written in its place, and signalled.

    A slot is free again when its next frame can come: see `Switch`. Element 0 of a rank's window is the last step that
    it decided, or `_FENCED`. Either is set by compare-and-swap, so a rank decides a step or is fenced, never both.
    """

    def __init__(self, comm: Communicator, head: int, payload: int, fences: bool, timeout: float) -> None:
        self._rank, self._epoch, self._fences, self._timeout = comm.rank, comm.epoch, fences, timeout
        whole = head + payload
        self._sizes = [whole, whole, head, head, 1]
        self._starts = [sum(self._sizes[:kind]) for kind in range(5)]
        self._slot = sum(self._sizes)
        self._memory = torch.zeros(1 + comm.size * self._slot, dtype=torch.int64, device="cpu")
        self._window = comm.window(self._memory, timeout)
        self.mapped = self._window.info.access == "mapped"
        """Whether the windows can carry frames."""
        self._theirs: dict[int, Tensor] = {}
        for rank in range(comm.size) if self.mapped else ():
            with contextlib.suppress(RegionGone):  # it is gone already: a signal to it finds that
                self._theirs[rank] = self._window.map(rank)

    def frame(self, rank: int, kind: int, words: int) -> Tensor:
        start = self._place(self._rank, kind)
        theirs = self._theirs.get(rank)
        return _words(words) if theirs is None else theirs[start : start + words]

    def _place(self, owner: int, kind: int) -> int:
        """The first element of the slot for `owner`'s frames."""
        return 1 + owner * self._slot + self._starts[kind]

    def send(self, rank: int, kind: int, frame: Tensor, timeout: float) -> None:
        with self._reported(rank):
            self._window.signal(rank, timeout)

    def receive(self, rank: int, kind: int, timeout: float) -> Tensor:
        with self._reported(rank):
            self._window.wait_signal(rank, timeout)
        if self._memory[self._place(rank, ABORT)]:
            raise _aborted(self._epoch, rank)
        start = self._place(rank, kind)
        return self._memory[start : start + self._sizes[kind]]

    @contextlib.contextmanager
    def _reported(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RegionGone as error:
            if self._window.closed:
                raise
            raise LinkGone(str(error)) from error

    def commit(self, step: int) -> bool:
        if not self._fences:
            return True
        return self._window.compare_swap(self._rank, 0, step - 1, step, self._timeout) != _FENCED

    def fence(self, rank: int, step: int) -> bool:
        while _FENCED < (decided := self._decided(rank)) < step:
            with self._reported(rank):
                self._window.compare_swap(rank, 0, decided, _FENCED, self._timeout)
        return decided == _FENCED

    def is_fenced(self, rank: int) -> bool:
        return self._fences and self._decided(rank) == _FENCED

    def _decided(self, rank: int) -> int:
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        with self._reported(rank):
            self._window.get(word, rank, 0, self._timeout)
        return int(word)

    def abort(self, rank: int) -> None:
        with contextlib.suppress(HoldfastError):
            one = torch.ones(1, dtype=torch.int64, device="cpu")
            self._window.put(one, rank, self._place(self._rank, ABORT), _LEAVE_SECONDS)
            self._window.signal(rank, _LEAVE_SECONDS)

    def close(self) -> None:
        self._window.close()


class MessageLinks(ExpertLinks):
    """A communicator for each direction of each pair, so a dead rank ends those towards it alone.

    Two, because the ops of a communicator run in order: a large frame on its way out would hold up those that come in.
    """

    def __init__(self, comm: Communicator, head: int, payload: int, timeout: float) -> None:
        self._comm, self._head, self._most = comm, head, payload
        self._to: dict[int, Communicator] = {}
        self._from: dict[int, Communicator] = {}
        self._sent: dict[int, Work] = {}
        self._coming: dict[int, tuple[Tensor, Work]] = {}
        """For each rank, its next message, which is received in the background: the sender need not wait for a call."""
        try:
            for source, target in permutations(range(comm.size), 2):  # all ranks in one order: no two wait crosswise
                if source == comm.rank:
                    self._to[target] = comm.split([source, target], timeout)
                elif target == comm.rank:
                    self._from[source] = comm.split([source, target], timeout)
            for source in self._from:
                self._receive_next(source)
        except BaseException:
            self._close_all()
            raise

    def frame(self, rank: int, kind: int, words: int) -> Tensor:
        return _words(words)

    def send(self, rank: int, kind: int, frame: Tensor, timeout: float) -> None:
        """Send kind, payload size and head as one message, then the payload, if there is one."""
        payload = frame[self._head :]
        first = torch.cat([torch.tensor([kind, len(payload)], device="cpu"), frame[: self._head]])
        self._issue(rank, [Send(first, 1)] + ([Send(payload, 1, _PAYLOAD)] if len(payload) else []))

    def _issue(self, rank: int, messages: list[Send]) -> None:
        with self._reported(self._to[rank]):
            self._sent[rank] = self._to[rank].batch_send_recv(messages, async_op=True, timeout=_PENDING_SECONDS)

    def receive(self, rank: int, kind: int, timeout: float) -> Tensor:
        channel = self._from[rank]
        with self._reported(channel):
            if rank not in self._coming:
                self._receive_next(rank)
            first, coming = self._coming[rank]
            coming.wait(timeout)
            came, words = first[:2].tolist()
            if came == ABORT:
                raise _aborted(self._comm.epoch, rank)
            if came != kind or not 0 <= words <= self._most:
                raise LinkGone(f"rank {rank} sent a frame of kind {came} and {words} words; this rank expected {kind}")
            frame = first[2:]
            if words:
                frame = _words(self._head + words)
                frame[: self._head] = first[2:]
                channel.recv(frame[self._head :], 0, _PAYLOAD, async_op=True, timeout=timeout).wait(timeout)
        del self._coming[rank]
        with contextlib.suppress(HoldfastError):  # the rank is gone meanwhile: the next call finds that
            self._receive_next(rank)
        return frame

    def _receive_next(self, rank: int) -> None:
        first = _words(2 + self._head)
        self._coming[rank] = first, self._from[rank].recv(first, 0, async_op=True, timeout=_PENDING_SECONDS)

    @contextlib.contextmanager
    def _reported(self, channel: Communicator) -> Iterator[None]:
        try:
            yield
        except PeerFailed as error:
            raise LinkGone(str(error)) from error
        except Revoked as error:
            over = channel.over
            if self._comm.over is None and isinstance(over, Revoked) and over.failure is PeerFailed:
                raise LinkGone(str(error)) from error  # an earlier message failed, in the background
            raise

    def abort(self, rank: int) -> None:
        with contextlib.suppress(HoldfastError, LinkGone):
            first = _words(2 + self._head)
            first[0] = ABORT
            self._issue(rank, [Send(first, 1)])

    def close(self) -> None:
        """Wait a moment for the last frames to arrive: a peer may need the last step's decision."""
        until = time.monotonic() + _LEAVE_SECONDS
        for work in self._sent.values():
            with contextlib.suppress(HoldfastError):
                work.wait(max(until - time.monotonic(), 0.0))
        self._close_all()

    def _close_all(self) -> None:
        for channel in (*self._to.values(), *self._from.values()):
            channel.close()


def _words(number: int) -> Tensor:
    return torch.zeros(number, dtype=torch.int64, device="cpu")


def _aborted(epoch: int, rank: int) -> Revoked:
    return Revoked(
        epoch, f"rank {rank} has ended the switch: it did not hear a rank in time, and raised that", OpTimeout
    )
