"""Every error that holdfast raises. A message says what happened, which ranks it concerns, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import msgspec

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes of another process that it cannot decode: RecursionError if they nest too deeply."""

_HEAP_TYPE = 1 << 9
"""The flag of a type that Python code made (`Py_TPFLAGS_HEAPTYPE`)."""


_SPELT_OUT = 32
"""How many ranks a message names; the error's attribute has all of them."""


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "unknown ranks"
    words = ", ".join(map(str, ranks[:_SPELT_OUT]))
    if len(ranks) > _SPELT_OUT:
        words += f" and {len(ranks) - _SPELT_OUT} more"
    return ("rank " if len(ranks) == 1 else "ranks ") + words


def rebuild(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    """Rebuild an exception from its parts, without an `__init__` of Python, which may take other arguments."""
    builtin = kind
    while builtin.__flags__ & _HEAP_TYPE and builtin.__base__ is not None:
        builtin = builtin.__base__
    error: BaseException = builtin.__new__(kind, *args)
    builtin.__init__(error, *args)  # a UnicodeDecodeError has its fields from here
    error.args = args
    error.__dict__.update(fields)
    return error


def valid_text(text: str, most: int | None = None) -> str:
    """The text, cut to `most` characters, as valid Unicode, which messages and files can hold.

    Python's names of files that are no UTF-8, and so many an OSError, are not.
    """
    return text[:most].encode(errors="replace").decode()


def describe(error: BaseException) -> str:
    """A text for an error, never empty, in valid Unicode.

    It begins with the type name, unless the error is a HoldfastError with a message.
    """
    text = valid_text(str(error))
    if isinstance(error, HoldfastError) and text:
        return text
    return type(error).__name__ + (f": {text}" if text else "")


def again(error: BaseException) -> BaseException:
    """Copy an error without its traceback, to raise a stored error repeatedly.

    Raising the stored error itself would keep alive the frames it passes through, and all that they refer to.
    """
    fields = {name: value for name, value in error.__dict__.items() if name != "__notes__"}
    args: Any = error.args
    if isinstance(error, OSError):  # its args leave out the name of the file
        args = OSError.__reduce__(error)[1]
    copy = rebuild(type(error), args, fields)
    copy.args = error.args
    copy.__cause__, copy.__suppress_context__ = error.__cause__, error.__suppress_context__
    return copy


class HoldfastError(RuntimeError):
    """The base class of all errors that holdfast itself raises."""

    retryable: bool = False
    """Whether what failed may succeed later, or elsewhere: services and runs then try again, within their bounds."""

    def again(self) -> Self:
        """Copy this error without its traceback: see the function `again`."""
        return cast(Self, again(self))

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild, (type(self), self.args, self.__dict__)


class BackendUnavailable(HoldfastError):
    """The backend is unknown, broken, or cannot run here."""

    def __init__(self, name: str, reason: str, install_hint: str = "") -> None:
        self.name, self.reason, self.install_hint = name, reason, install_hint
        super().__init__(f"backend {name!r} is not available: {reason}" + (f"; {install_hint}" * bool(install_hint)))


class Unsupported(HoldfastError):
    """The backend cannot do this; no byte has moved."""

    def __init__(self, capability: str, hint: str = "") -> None:
        self.capability = capability
        super().__init__(f"unsupported: {capability}" + (f"; {hint}" * bool(hint)))


class Mismatch(HoldfastError):
    """Ranks, threads or processes disagree about what is being done."""


class ConcurrentCall(Mismatch):
    """An op was called while another thread is inside an op of the same communicator."""


class ResourceExhausted(HoldfastError):
    """This process ran out of a `resource`; no peer is to blame.

    `need` and `limit` say how much was needed and how much there is.
    """

    def __init__(self, resource: str, need: str, limit: str, hint: str = "") -> None:
        self.resource, self.need, self.limit = resource, need, limit
        super().__init__(f"this process is out of {resource}: it needs {need}, {limit}" + (f"; {hint}" * bool(hint)))


class UsedAfterFork(HoldfastError):
    """A forked child used an object of its parent; nothing was done. `what` names it, `owner` is the parent's pid."""

    def __init__(self, what: str, owner: int) -> None:
        self.what, self.owner = what, owner
        super().__init__(
            f"{what} belongs to process {owner}, from which this one was forked; make one here, under a rank or a name "
            "of this process's own, or start processes before it is made"
        )


class OpTimeout(HoldfastError, TimeoutError):
    """An operation did not complete in time.

    `op` is its name, `seq` its number on the communicator, `waited` the time in seconds. `missing_ranks` had not
    arrived, as far as this rank can tell. For an op of a communicator, `communicator` is the communicator's name and
    `joint` the op's number among the collectives; 0 for other ops, and if it was not begun. `split_from` is as in
    `PeerFailed`.
    """

    def __init__(self, op: str, seq: int, waited: float, missing_ranks: Sequence[int] = ()) -> None:
        self.op, self.seq, self.waited, self.missing_ranks = op, seq, waited, tuple(missing_ranks)
        self.communicator, self.joint = "", 0
        self.split_from: tuple[str, tuple[int, ...]] = ("", ())
        super().__init__(
            f"{op} (op {seq}) timed out after {waited:.3g} s waiting for {_ranks(self.missing_ranks)}; "
            "abort the communicator and build the next one, or raise the timeout if that was too short"
        )


class StillRunning(OpTimeout):
    """`Work.wait` reached its own timeout. The op goes on, until the timeout that it was issued with."""

    def __init__(self, op: str, waited: float) -> None:
        super().__init__(op, 0, waited)
        self.args = (f"{op} is still running after {waited:.3g} s of waiting; it goes on: wait again, or longer",)


class PeerFailed(HoldfastError):
    """Other `ranks` are gone; `evidence` says how that is known.

    If an op of a communicator failed, `communicator` is its name, and `ranks` are ranks of it. If that one was split
    from another, `split_from` is the name of the other, and the ranks there of its members.
    """

    def __init__(self, ranks: Sequence[int], evidence: str) -> None:
        self.ranks, self.evidence = tuple(ranks), evidence
        self.communicator = ""
        self.split_from: tuple[str, tuple[int, ...]] = ("", ())
        super().__init__(f"{_ranks(self.ranks)} failed: {evidence}; rebuild the communicator without them")


class Revoked(HoldfastError):
    """The communicator of this epoch is over: aborted, closed or replaced by a later one.

    If a failed op ended it, `failure` is the type of that op's error. `own` says that a call of this rank aborted or
    closed it.
    """

    def __init__(
        self,
        epoch: int,
        reason: str = "aborted",
        failure: type[BaseException] | None = None,
        own: bool = False,
    ) -> None:
        self.epoch, self.reason, self.failure, self.own = epoch, reason, failure, own
        super().__init__(f"the communicator of epoch {epoch} is over: {reason}; use the next one")


class NotConnected(HoldfastError):
    """The communicator has no members yet, as `unconnected` makes it, or it is suspended."""

    def __init__(self, communicator: str, suspended: bool = False) -> None:
        self.communicator, self.suspended = communicator, suspended
        state = "is suspended; call resume() on all ranks first"
        if not suspended:
            state = "is not connected yet; pass reconfigure() the handles of its members first"
        super().__init__(f"communicator {communicator!r} {state}")


class RegionGone(HoldfastError):
    """The exposed memory was closed, or its process died. Data that was read must not be used."""


class CorruptData(HoldfastError):
    """Received or stored bytes have a wrong checksum or format."""


class NonFinite(HoldfastError):
    """A tensor of an op held NaN or infinity: `nans` and `infinities` count them.

    `tensor` names the first such tensor on rank `rank`: "input" or "output", of a list "inputs[3]". The op itself is
    done, and the communicator lives.
    """

    def __init__(self, op: str, seq: int, rank: int, tensor: str, nans: int, infinities: int) -> None:
        self.op, self.seq, self.rank, self.tensor, self.nans, self.infinities = op, seq, rank, tensor, nans, infinities
        whose = "this rank contributed them" if tensor.startswith("input") else "its inputs here were finite"
        super().__init__(
            f"{op} (op {seq}) on rank {rank}: its {tensor} holds {nans} NaN and {infinities} infinite numbers; {whose}"
        )


class StaleEpoch(HoldfastError):
    """A call belongs to an epoch that is over; nothing was changed."""
