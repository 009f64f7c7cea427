"""How frames pass between two ranks of a switch: through a window, which reaches memory directly or by messages.

Each pair of ranks stands alone: the end of one is reported by the links to it, and disturbs no other. Frames from one
rank arrive in the order in which it sent them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone, Revoked, Unsupported
from holdfast.comms.plugins.registry import registry

Tensor = torch.Tensor

OUT, BACK, REPORT, DECISION, ABORT = range(5)
"""The kinds of frames: rows to experts, rows back, and what `MaskAgreement` sends; or that the switch is over."""

_FENCED = -1
_ABORT_SECONDS = 0.2


class LinkGone(Exception):
    """The rank at the other end has ended, left or been fenced: it takes part in no later step."""


class Links:
    """The links of one rank to the others. A frame is a tensor of int64: a head of fixed size, then a payload.

    Each rank exposes, for each other one, a slot a kind of frame. A frame is written in its place, and signalled. A
    slot is free again when its next frame can come: see `Switch`. Element 0 of a rank's window is the last step that it
    decided, or `_FENCED`. Either is set by compare-and-swap, so a rank decides a step or is fenced, never both.
    """

    def __init__(self, comm: Communicator, head: int, payload: int, fences: bool, timeout: float) -> None:
        """Open links for frames of `head` words and up to `payload` more; collective."""
        if not registry().backends[comm.backend].capabilities.windows:
            raise Unsupported(
                f"experts over {comm.backend!r}", "it has no windows: `holdfast backends` lists those that do"
            )
        self._rank, self._epoch, self._fences, self._timeout = comm.rank, comm.epoch, fences, timeout
        whole = head + payload
        self._sizes = [whole, whole, head, head, 1]
        self._starts = [sum(self._sizes[:kind]) for kind in range(5)]
        self._slot = sum(self._sizes)
        self._memory = torch.zeros(1 + comm.size * self._slot, dtype=torch.int64, device="cpu")
        self._window = comm.window(self._memory, timeout)
        self._mapped: dict[int, Tensor] = {}
        if self._window.info.access == "mapped":
            for rank in range(comm.size):
                with contextlib.suppress(RegionGone):  # it is gone already: a signal to it finds that
                    self._mapped[rank] = self._window.map(rank)
        elif fences:
            self.close()
            raise Unsupported(
                f"silence='mask' over this {comm.backend!r}",
                "a stopped rank cannot be fenced there, and might go on alone later; use silence='raise', or a backend "
                "that maps windows between processes of one host (`holdfast backends`)",
            )

    def frame(self, rank: int, kind: int, words: int) -> Tensor:
        """Memory for a frame to `rank`: fill it and send it, before the next one is asked for."""
        start = self._place(self._rank, kind)
        theirs = self._mapped.get(rank)
        return torch.zeros(words, dtype=torch.int64, device="cpu") if theirs is None else theirs[start : start + words]

    def _place(self, owner: int, kind: int) -> int:
        """The first element of the slot for `owner`'s frames."""
        return 1 + owner * self._slot + self._starts[kind]

    def send(self, rank: int, kind: int, frame: Tensor, timeout: float) -> None:
        """Send a frame. Raises `LinkGone`, `OpTimeout`."""
        with self._reported(rank):
            if rank not in self._mapped:
                self._window.put(frame, rank, self._place(self._rank, kind), timeout)
            self._window.signal(rank, timeout)

    def receive(self, rank: int, kind: int, timeout: float) -> Tensor:
        """Wait for the next frame of `rank`, which is of this kind. Raises `LinkGone`, `OpTimeout`.

        The frame is valid until that rank has been sent the report of the step. Raises `Revoked` if the rank aborted.
        """
        with self._reported(rank):
            self._window.wait_signal(rank, timeout)
        if self._memory[self._place(rank, ABORT)]:
            why = f"rank {rank} has ended the switch: it did not hear a rank in time, and raised that"
            raise Revoked(self._epoch, why, OpTimeout)
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
        """Record that this rank has decided `step`; False if it was fenced before."""
        if not self._fences:
            return True
        return self._window.compare_swap(self._rank, 0, step - 1, step, self._timeout) != _FENCED

    def fence(self, rank: int, step: int) -> bool:
        """Exclude a silent rank unless it has decided `step`; whether it is excluded now."""
        while _FENCED < (decided := self._decided(rank)) < step:
            with self._reported(rank):
                self._window.compare_swap(rank, 0, decided, _FENCED, self._timeout)
        return decided == _FENCED

    def is_fenced(self, rank: int) -> bool:
        """Whether a rank has fenced `rank`."""
        return self._fences and self._decided(rank) == _FENCED

    def _decided(self, rank: int) -> int:
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        with self._reported(rank):
            self._window.get(word, rank, 0, self._timeout)
        return int(word)

    def abort(self, rank: int) -> None:
        """Make the waits of `rank` for this rank raise `Revoked`, as far as it can be reached."""
        with contextlib.suppress(HoldfastError):
            one = torch.ones(1, dtype=torch.int64, device="cpu")
            self._window.put(one, rank, self._place(self._rank, ABORT), _ABORT_SECONDS)
            self._window.signal(rank, _ABORT_SECONDS)

    def close(self) -> None:
        """Leave: the others' links to this rank raise `LinkGone`."""
        self._window.close()
