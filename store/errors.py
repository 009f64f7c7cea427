"""The store's errors: subclasses of those in `holdfast.comms.errors`.

Those of torchstore's interface are also the builtin errors that code written for torchstore expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch, OpTimeout, RegionGone, StaleEpoch, Unsupported


class NoSuchVersion(RegionGone, LookupError):
    """A version that is not in the store, or no longer. `version` was asked for, `there` are the visible versions.

    `mixed` are tensors of the reader that hold a mixture, because the version went while it was read.
    """

    mixed: tuple[str, ...] = ()

    def __init__(self, version: int | str, why: str, there: Sequence[int]) -> None:
        self.version, self.there = version, tuple(there)
        what = "there is no latest version" if version == "latest" else f"version {version} is not in the store"
        listed = f"it has {', '.join(map(str, there))}" if there else "publish one, or wait() for the first"
        HoldfastError.__init__(self, f"{what}: {why}; {listed}")


class StoreTimeout(OpTimeout):
    """A call of the store that timed out after `waited` seconds. `op` names the call, `seq` is the version.

    `mixed` are tensors of the reader that hold a mixture of old and new bytes.
    """

    retryable = True
    mixed: tuple[str, ...] = ()

    def __init__(self, op: str, version: int, waited: float, why: str) -> None:
        self.op, self.seq, self.waited, self.missing_ranks = op, version, waited, ()
        HoldfastError.__init__(self, f"{op} of version {version} timed out after {waited:.3g} s: {why}")


class CopyFailed(HoldfastError):
    """A version could not be written to, or read from, a directory `path`. Nothing is left of a copy that failed."""

    def __init__(self, path: Path, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"{path}: {why}")


class NoRoomOnDisk(CopyFailed):
    """The disk of `path` has no room for a version. Nothing is left of the copy; the store is as it was."""


class NotCaughtUp(HoldfastError):
    """A reader may not serve yet. It has version `serves`, and must have `needs`; None: none, or not known."""

    def __init__(self, reader: str, serves: int | None, needs: int | None, why: str) -> None:
        self.reader, self.serves, self.needs = reader, serves, needs
        super().__init__(f"reader {reader!r} may not serve yet: {why}; call catch_up(), or use batch(), which waits")


class ReaderReplaced(StaleEpoch):
    """Another process, `pid`, took over the reader of a follower, or it was removed: it may not serve."""

    def __init__(self, reader: str, pid: int | None) -> None:
        self.reader, self.pid = reader, pid
        by = "its process was taken for dead, or its store closed" if pid is None else f"process {pid} took its place"
        super().__init__(f"reader {reader!r} of this process is over: {by}; call follow() again, and catch up")


class FollowFailed(HoldfastError):
    """The background of a follower failed in a way that no other error of the store describes; see `__cause__`."""


class CallCancelled(HoldfastError):
    """A call was cancelled by another thread, or by its asyncio task. `op` names it.

    `mixed` are tensors of the reader that hold a mixture of old and new bytes.
    """

    mixed: tuple[str, ...] = ()

    def __init__(self, op: str) -> None:
        self.op = op
        super().__init__(f"{op} was cancelled")


class StoreFull(StoreTimeout):
    """A part found no room in the memory of its store.

    It needs `nbytes`; `used` of `limit` bytes are taken.
    """

    retryable = False

    def __init__(self, version: int, nbytes: int, used: int, limit: int, waited: float) -> None:
        self.nbytes, self.used, self.limit = nbytes, used, limit
        super().__init__(
            "publish",
            version,
            waited,
            f"a part of {nbytes} bytes finds no room: {used} of {limit} bytes are taken; keep fewer versions, let pins "
            "and mapped tensors go, or open the store with a higher limit",
        )


class CorruptVersion(CorruptData):
    """No replica of a part has the right bytes. `mixed` are tensors of the reader that hold a mixture."""

    mixed: tuple[str, ...] = ()


def with_mixture(error: HoldfastError, mixed: Sequence[str]) -> HoldfastError:
    """The same error, saying which tensors of the reader hold a mixture."""
    shown = ", ".join(mixed[:4]) + (f" and {len(mixed) - 4} more" if len(mixed) > 4 else "")
    said = f"{error}; `into` holds a mixture in {shown}: get a version into it again, or use atomic=True"
    found = error if isinstance(error, (NoSuchVersion, StoreTimeout, CallCancelled)) else CorruptVersion(said)
    found.args = (said,)
    found.mixed = tuple(mixed)
    return found


class NoSuchKey(HoldfastError, KeyError):
    """Keys that are not in the store, or of which some shards were not put yet."""

    def __str__(self) -> str:
        return str(self.args[0])


class NotInitialized(HoldfastError):
    """No store of this name can be found from this process, or it was shut down."""

    def __init__(self, store_name: str, why: str) -> None:
        self.store_name = store_name
        super().__init__(f"store {store_name!r}: {why}; call initialize() in this process or in one that starts it")


class NoSuchSlice(Mismatch):
    """A slice, or a tensor to fill, that the stored tensor does not cover."""


class ObjectRefused(Unsupported, TypeError):
    """An object that cannot be stored, because it would have to be pickled."""

    def __init__(self, key: str, why: str) -> None:
        self.key = key
        hint = "put dicts, lists, tuples, sets, numbers, text, bytes, None and tensors; they are never pickled"
        super().__init__(f"putting {key!r}: {why}", hint)
