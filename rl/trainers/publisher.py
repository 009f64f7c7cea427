"""Publishes the weights of committed steps, beside the next step."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from holdfast.comms.errors import Mismatch, Revoked, StaleEpoch
from holdfast.rl.telemetry import WorkLog
from holdfast.store import WeightStore


class Publisher:
    """One publication at a time, in a thread of its own. The tensors may change once `finish` has returned."""

    def __init__(self, store: WeightStore, work: WorkLog | None = None) -> None:
        self._store, self._work = store, work or WorkLog()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish-weights")
        self._open: tuple[int, int, Future[None]] | None = None

    def visible(self, version: int) -> bool:
        """Whether readers can read this version, or there is a later one."""
        newest = self._store.latest()
        return newest is not None and newest >= version

    def begin(self, version: int, state: Mapping[str, Any], epoch: int) -> None:
        """Publish this rank's part of a version as a member of `epoch`, after the one before. Raises as `finish`."""
        self.finish()
        publishing = self._thread.submit(self._publish, version, state, epoch)
        self._open = version, epoch, publishing

    def _publish(self, version: int, state: Mapping[str, Any], epoch: int) -> None:
        with self._work.doing("publish", version):
            self._store.publish(version, state, fence=epoch)

    def finish(self) -> None:
        """Wait until the part outlives this process. Raises the store's errors, `Revoked` if the epoch is over."""
        if self._open is None:
            return
        (version, epoch, publishing), self._open = self._open, None
        try:
            publishing.result()
        except StaleEpoch as error:
            raise Revoked(epoch, str(error)) from error
        except Mismatch:
            if not self.visible(version):  # else members of the epoch before had published all of it after all
                raise

    def close(self) -> None:
        """Wait for the open publication, and leave the store. Idempotent."""
        self._thread.shutdown()
        self._store.close()
