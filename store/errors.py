"""The store's errors: subclasses of those in `holdfast.comms.errors`."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone


class NoSuchVersion(RegionGone, LookupError):
    """A version that is not in the store, or no longer. `version` was asked for, `there` are the visible versions."""

    def __init__(self, version: int | str, why: str, there: Sequence[int]) -> None:
        self.version, self.there = version, tuple(there)
        listed = f"it has {', '.join(map(str, there))}" if there else "it has none; wait() for the first"
        HoldfastError.__init__(self, f"version {version} is not in the store: {why}; {listed}")


class StoreTimeout(OpTimeout):
    """A call of the store that timed out after `waited` seconds. `op` names the call, `seq` is the version."""

    def __init__(self, op: str, version: int, waited: float, why: str) -> None:
        self.op, self.seq, self.waited, self.missing_ranks = op, version, waited, ()
        HoldfastError.__init__(self, f"{op} of version {version} timed out after {waited:.3g} s: {why}")
