"""Caches the newest view of a remote register, which a thread follows: reads never block."""

from __future__ import annotations

import threading

from holdfast.ft.membership.view import View
from holdfast.ft.node.register import Register
from holdfast.ft.registers import RegisterAway

LOOK_SECONDS = 1.0
AGAIN_SECONDS = 0.05
END_SECONDS = 10.0


class ViewCache:
    """Follows `register` until that is closed. While it is away, the newest view is the last known one."""

    def __init__(self, register: Register) -> None:
        self._register = register
        self._view: View | None = None
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow-register", daemon=True)
        self._thread.start()

    def newest(self) -> View | None:
        """The newest known view; None before the first. Raises the error if the register holds no view."""
        if self._failure is not None:
            raise self._failure
        return self._view

    def close(self) -> None:
        """Close the register, and end the thread. Idempotent."""
        self._over.set()
        self._register.close()
        self._thread.join(END_SECONDS)

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                epoch = 0 if self._view is None else self._view.epoch
                self._view = self._register.watch(epoch, LOOK_SECONDS) or self._view
            except RegisterAway:
                self._over.wait(AGAIN_SECONDS)
            except Exception as error:
                self._failure = error
                return
