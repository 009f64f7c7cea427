"""One try at one step: what `Session.steps` yields, to be entered with `with`."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Revoked
from holdfast.comms.system import forks

if TYPE_CHECKING:
    from holdfast.comms.torchdist.session_group import BorrowedProcessGroup

FAILURES = (PeerFailed, Revoked, OpTimeout)
"""What the death of a peer can look like inside an attempt."""


class Transaction(Protocol):
    """What an attempt needs of its session."""

    def commit(self) -> None:
        """Agree that the step is done. Raises one of `FAILURES`."""

    def recover(self, failure: HoldfastError) -> bool:
        """Wait for the next epoch; whether the step turned out to be committed. Raises if there is no next epoch."""

    def process_group(self) -> BorrowedProcessGroup:
        """torch's default process group, over the communicator of the epoch at hand."""


class Attempt:
    """One try at step number `step` (0, 1, ...), as rank `rank` of the members of `epoch`, over `comm`.

    `shards` are the parts of the step that are this rank's, of `total`: together the ranks have each of them once.
    After the `with` block `committed` says whether the step is done, on all ranks alike. If it is not, a peer has
    failed, and the same step comes again.
    """

    def __init__(self, transaction: Transaction, comm: Communicator, step: int, total: int) -> None:
        self.step = step
        self.comm = comm
        self.epoch = comm.epoch
        self.rank = comm.rank
        self.total = total
        self.shards = self.share(comm.rank, comm.size)
        self.committed = False
        self.entered = False
        self.settled = False
        self._transaction = transaction
        forks.own(self, f"the attempt at step {step}", ("step", "comm", "epoch", "rank", "total", "shards"))

    def __repr__(self) -> str:
        state = ", committed" * self.committed
        return f"<Attempt at step {self.step}: rank {self.rank} of {self.comm.size}, epoch {self.epoch}{state}>"

    def share(self, part: int, parts: int) -> tuple[int, ...]:
        """The shards of part `part`, if the step is divided into so many: neighbours, as evenly as can be. For ranks
        that work on the same shards, such as those of one tensor-parallel group.
        """
        return tuple(range(self.total * part // parts, self.total * (part + 1) // parts))

    def process_group(self) -> BorrowedProcessGroup:
        """torch.distributed's default group in this epoch: what DDP, `fully_shard` and DeviceMesh work over. It runs on
        `comm` and ends with the epoch, as does what was made over it.

        Collective only in its subgroups. Raises HoldfastError if torch has another default group in this process.
        """
        return self._transaction.process_group()

    def __enter__(self) -> Attempt:
        if self.entered:
            raise HoldfastError("this attempt was made already; each that steps() yields can be entered once")
        self.entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            try:
                self._transaction.commit()
            except FAILURES as failure:
                self.committed = self._transaction.recover(failure)
            else:
                self.committed = True
            self.settled = True
            return False
        cause = error if isinstance(error, FAILURES) else self._failure_behind(error)
        if cause is None:
            return False
        self.committed = self._transaction.recover(cause)
        self.settled = True
        return True

    def _failure_behind(self, error: BaseException) -> HoldfastError | None:
        """What ended the communicator, if `error` may be how a library says so.

        torch hands on what its callbacks raise (those of DistributedDataParallel's reducer) as RuntimeErrors that have
        nothing but the text.
        """
        over = self.comm.over
        if isinstance(error, HoldfastError) or not isinstance(error, RuntimeError) or not isinstance(over, FAILURES):
            return None
        return over.again()
