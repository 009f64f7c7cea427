"""One attempt at one step: `Session.steps` yields it, the caller enters it with `with`."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Revoked
from holdfast.comms.system import forks

if TYPE_CHECKING:
    from holdfast.comms.torchdist.session_group import SessionProcessGroup
    from holdfast.ft.session import Session

FAILURES = (PeerFailed, Revoked, OpTimeout)
"""The errors that the death of a peer can cause inside an attempt."""


_READABLE = ("step", "comm", "epoch", "rank", "total", "total_shards", "shards", "alive", "degraded")
"""What a forked child can still read of its parent's attempt."""


_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


def profiled(name: str) -> AbstractContextManager[object]:
    """A range of that name in a recording of `torch.profiler`; without one it costs next to nothing."""
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(name)


class Attempt:
    """One attempt at step `step` (0, 1, ...), as rank `rank` of the members of `epoch`, over `comm`.

    A step's work is divided into `total_shards` shards, numbered from 0: the number that `ft.Session(shards=...)` set
    for the job (default: its `size`), the same in every epoch. `shards` are the numbers of this rank's shards; each
    shard belongs to one rank. A mean over the whole step is the sum over all shards divided by `total_shards`.

    `alive` says of each rank of `comm` whether it was a member when the attempt began. Nobody does the shards of one
    that is not; only a session with `on_death="go_on"` has such attempts.

    After the `with` block, `committed` says whether the step is done, alike on all ranks. If it is not, a peer has
    failed, and `Session.steps` yields the same step again.
    """

    def __init__(self, transaction: Session, comm: Communicator, step: int, total_shards: int) -> None:
        self.step = step
        self.comm = comm
        self.epoch = comm.epoch
        self.rank = comm.rank
        self.total_shards = total_shards
        self.shards = self.share(comm.rank, comm.size)
        self.committed = False
        self.entered = False
        self.settled = False
        self._transaction = transaction
        self.alive = transaction.alive
        self._range: AbstractContextManager[object] = _NOTHING
        forks.refuse_in_children(self, f"the attempt at step {step}", _READABLE)

    def __repr__(self) -> str:
        state = ", committed" * self.committed
        return f"<Attempt at step {self.step}: rank {self.rank} of {self.comm.size}, epoch {self.epoch}{state}>"

    @property
    def degraded(self) -> bool:
        """Whether a rank had died before this attempt, and the others go on without it: see `alive`."""
        return not all(self.alive)

    @property
    def lasting(self) -> Communicator:
        """A communicator of all ranks that a member's death leaves as it is: for a `Switch` or a window.

        It is made on the first use in an epoch, by all ranks alike. It ends when the next communicator is built. Raises
        HoldfastError if the session was made with `on_death="rebuild"`, or a member died before the first use.
        """
        return self._transaction.lasting()

    @property
    def total(self) -> int:
        """The same as `total_shards`, which is the name to use."""
        return self.total_shards

    def share(self, part: int, parts: int) -> tuple[int, ...]:
        """The shards of part `part`, if the step is divided into `parts`: consecutive numbers, as evenly as possible.

        For ranks that work on the same shards, such as those of one tensor-parallel group.
        """
        return tuple(range(self.total_shards * part // parts, self.total_shards * (part + 1) // parts))

    def process_group(self) -> SessionProcessGroup:
        """torch.distributed's default group in this epoch, for DDP, `fully_shard` and DeviceMesh.

        It runs on `comm`. It ends with the epoch, and so does everything that was built on it. Only the creation of
        subgroups is collective. Raises HoldfastError if torch has another default group in this process.
        """
        return self._transaction.process_group()

    def __enter__(self) -> Attempt:
        if self.entered:
            raise HoldfastError("this attempt was made already; each that steps() yields can be entered once")
        self.entered = True
        self._range = profiled(f"holdfast step {self.step}")
        self._range.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return self._end(error)
        finally:
            self._range.__exit__(None, None, None)

    def _end(self, error: BaseException | None) -> bool:
        """Commit or recover the step; returns whether `error` is dealt with."""
        cause = error if error is None or isinstance(error, FAILURES) else self._failure_behind(error)
        if error is not None and cause is None:
            return False
        self.committed = self._transaction.end_attempt(cause)
        self.settled = True
        return error is not None

    def _failure_behind(self, error: BaseException) -> HoldfastError | None:
        """The error that ended the communicator, if `error` may be a library's report of it.

        torch turns what its callbacks raise (those of DistributedDataParallel's reducer) into a RuntimeError that
        keeps only the text.
        """
        over = self.comm.over
        if isinstance(error, HoldfastError) or not isinstance(error, RuntimeError) or not isinstance(over, FAILURES):
            return None
        return over.again()
