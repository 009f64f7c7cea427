"""Follows the view of a job in a register that other hosts share, in a thread of its own."""

from __future__ import annotations

import contextlib
import threading

from holdfast.comms.errors import CorruptData
from holdfast.ft.membership.view import View
from holdfast.ft.node.register import Register
from holdfast.ft.registers import RegisterAway

WATCH_SECONDS = 1.0
AWAY_SECONDS = 0.2


class JobWatch:
    """`view` is the newest view that the register has shown; while the register is away, it stays the last one."""

    def __init__(self, url: str) -> None:
        """Raises `RegisterAway` and `CorruptData` if the register cannot be read now."""
        self._register = Register.open(url)
        self._closing = threading.Event()
        try:
            self.view: View | None = self._register.read()
        except BaseException:
            self._register.close()
            raise
        self._thread = threading.Thread(target=self._follow, name="holdfast-job-watch", daemon=True)
        self._thread.start()

    def read(self) -> View | None:
        """The newest view, asked for now; the last one known if the register is away."""
        with contextlib.suppress(RegisterAway, CorruptData):
            self.view = self._register.read() or self.view
        return self.view

    def _follow(self) -> None:
        while not self._closing.is_set():
            known = self.view
            try:
                newest = self._register.watch(0 if known is None else known.epoch, WATCH_SECONDS)
            except (RegisterAway, CorruptData):
                self._closing.wait(AWAY_SECONDS)
                continue
            if newest is not None:
                self.view = newest

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closing.set()
        self._register.close()
        self._thread.join()
