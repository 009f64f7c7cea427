"""The errors that a parent raises for failed ranks.

A rank's exception is raised as a dynamic type that is both `RankFailed` and the original type, so that
`except ValueError` and `pytest.raises(PeerFailed)` work, while the text names the rank and has the remote traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.comms.errors import HoldfastError, PeerFailed
from holdfast.ft.processes.child_process import Exit
from holdfast.ft.processes.remote_calls import PackedError, error_of, one_line, pack_error, recipe_of, unpack_error


class RankFailed(HoldfastError):
    """A rank raised an exception: `rank` says which, `trace` is its traceback, `__cause__` the original error."""

    rank: int
    trace: str

    def __str__(self) -> str:
        said = one_line(self.__cause__) if self.__cause__ else super().__str__()
        return f"rank {self.rank}: {said}" + (f"\n\n{self.trace}" * bool(self.trace))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_failure, (self.rank, pack_error(self.__cause__ or self), self.trace)


class RankDied(RankFailed, PeerFailed):
    """The process of a rank ended: `exit` says how. Also a `PeerFailed`, with its `ranks` and `evidence`."""

    def __init__(self, rank: int, exit: Exit, evidence: str) -> None:  # noqa: A002
        self.rank, self.exit, self.trace = rank, exit, ""
        self.ranks, self.evidence = (rank,), evidence
        HoldfastError.__init__(self, f"rank {rank} died: {evidence}")

    __str__ = HoldfastError.__str__
    __reduce__ = HoldfastError.__reduce__


class RunTimeout(HoldfastError, TimeoutError):
    """Ranks did not return in time. `ranks` says which, `where` has their stacks."""

    def __init__(self, ranks: Sequence[int], waited: float, where: str) -> None:
        self.ranks, self.waited, self.where = tuple(ranks), waited, where
        super().__init__(
            f"rank(s) {', '.join(map(str, ranks))} did not return within {waited:.3g} s"
            + (f"; they were at:\n{where}" * bool(where))
        )


def rank_failure(rank: int, original: BaseException, trace: str) -> RankFailed:
    """The error to raise for `original`, which rank `rank` raised: a `RankFailed` that is also of its type."""
    try:
        failure = error_of(_both(type(original)), recipe_of(original))
    except TypeError:
        failure = RankFailed(*original.args)
    assert isinstance(failure, RankFailed)
    failure.rank, failure.trace, failure.__cause__ = rank, trace, original
    return failure


def _both(kind: type[BaseException]) -> type[BaseException]:
    """A type that is both `RankFailed` and `kind`; `RankFailed` alone if `kind` ends interpreters (SystemExit ...)."""
    if issubclass(RankFailed, kind) or not issubclass(kind, Exception):
        return RankFailed
    methods = {"__str__": RankFailed.__str__, "__reduce__": RankFailed.__reduce__, "__module__": kind.__module__}
    return type(kind.__name__, (kind, RankFailed), methods)


def _unpack_failure(rank: int, packed: PackedError, trace: str) -> RankFailed:
    return rank_failure(rank, unpack_error(packed), trace)
