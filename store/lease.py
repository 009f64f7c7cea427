"""`Lease`: keeps a version."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.comms.system import forks


class Lease:
    """A version that stays until `release`, or until its store closes or this process ends; a context manager."""

    def __init__(self, version: int, release: Callable[[], None]) -> None:
        self.version = version
        self._release: Callable[[], None] | None = release
        forks.refuse_in_children(self, f"a lease on version {version}", ("version",))

    def release(self) -> None:
        """End the lease. Idempotent. If the register cannot be reached, raises `RegisterAway`; the version stays."""
        if self._release is not None:
            self._release()
            self._release = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
