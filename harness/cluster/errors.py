"""The errors that a parent raises for failed ranks, and the packing of a rank's exception.

A rank's exception is raised as a dynamic type that is both `RankFailed` and the original type, so that
`except ValueError` and `pytest.raises(PeerFailed)` work, while the text names the rank and has the remote traceback.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from holdfast.comms.errors import HoldfastError, PeerFailed, rebuild
from holdfast.harness.processes.zygote_client import Exit


class RankFailed(HoldfastError):
    """A rank raised an exception: `rank` says which, `trace` is its traceback, `__cause__` the original error."""

    rank: int
    trace: str

    def __str__(self) -> str:
        said = _summary(self.__cause__) if self.__cause__ else super().__str__()
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


@dataclass(frozen=True, slots=True)
class PackedError:
    """A packed exception. `pickled` is its type and recipe, or None if these cannot be pickled."""

    pickled: bytes | None
    summary: str
    trace: str


def pack_error(error: BaseException) -> PackedError:
    """Pack an exception of any type. Never raises."""
    trace = "".join(traceback.format_exception(error)).strip()
    for recipe in (_recipe(error), _Recipe(False, (str(error),), {})):
        try:
            return PackedError(cloudpickle.dumps((type(error), recipe)), _summary(error), trace)
        except Exception:
            continue
    return PackedError(None, _summary(error), trace)


def unpack_error(packed: PackedError) -> BaseException:
    """The original exception, or a `RuntimeError` with its text if its type does not exist here."""
    if packed.pickled is not None:
        try:
            kind, recipe = cloudpickle.loads(packed.pickled)
            return _make(kind, recipe)
        except Exception:
            pass
    return RuntimeError(packed.summary)


def rank_failure(rank: int, original: BaseException, trace: str) -> RankFailed:
    """The error to raise for `original`, which rank `rank` raised: a `RankFailed` that is also of its type."""
    try:
        failure = _make(_both(type(original)), _recipe(original))
    except TypeError:
        failure = RankFailed(*original.args)
    assert isinstance(failure, RankFailed)
    failure.rank, failure.trace, failure.__cause__ = rank, trace, original
    return failure


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to make an exception: call its type with `args`, or only set `args`; then set the `fields`."""

    call: bool
    args: tuple[Any, ...]
    fields: dict[str, Any]


def _recipe(error: BaseException) -> _Recipe:
    """The recipe of an exception.

    Types with a constructor in C (OSError ...) are called again, as they hide their arguments; a constructor in Python
    may take others than `args`, so it is not called.
    """
    if isinstance(type(error).__init__, types.WrapperDescriptorType):
        reduced = error.__reduce__()
        if isinstance(reduced, tuple) and reduced[0] is type(error):
            return _Recipe(True, reduced[1], error.__dict__)
    return _Recipe(False, error.args, error.__dict__)


def _make(kind: type[BaseException], recipe: _Recipe) -> BaseException:
    if not recipe.call:
        return rebuild(kind, recipe.args, recipe.fields)
    error = kind(*recipe.args)
    error.__dict__.update(recipe.fields)
    return error


def _both(kind: type[BaseException]) -> type[BaseException]:
    """A type that is both `RankFailed` and `kind`; `RankFailed` alone if `kind` ends interpreters (SystemExit ...)."""
    if issubclass(RankFailed, kind) or not issubclass(kind, Exception):
        return RankFailed
    methods = {"__str__": RankFailed.__str__, "__reduce__": RankFailed.__reduce__, "__module__": kind.__module__}
    return type(kind.__name__, (kind, RankFailed), methods)


def _unpack_failure(rank: int, packed: PackedError, trace: str) -> RankFailed:
    return rank_failure(rank, unpack_error(packed), trace)


def _summary(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
