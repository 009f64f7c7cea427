"""SIGTERM as a request to leave the job: schedulers send it before they take a process away.

A session finishes its step, tells the others that it leaves, and ends the process with status 143. Outside of a step it
leaves at once. A second SIGTERM ends the process as if it had no handler.
"""

from __future__ import annotations

import os
import signal
import threading

from holdfast.comms.system import forks

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a process that left because it was asked to, as that of a shell."""


class Terminated(SystemExit):
    """SIGTERM asked this process to leave its job, and it has finished its step. Ends the process with status 143.

    No `HoldfastError`: like KeyboardInterrupt it passes through `except Exception`.
    """

    def __init__(self) -> None:
        super().__init__(TERMINATED)

    def __str__(self) -> str:
        return "SIGTERM asked this process to leave"


class TerminationRequest:
    """Handles SIGTERM for a session from `begin` to `end`. While the process is `in_steps`, it leaves at `obey`."""

    def __init__(self) -> None:
        self.in_steps = False
        self._asked = self._handles = False

    def begin(self) -> None:
        """Take SIGTERM over, in the main thread of a program that has no handler of its own for it."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._handles = True
            forks.reset_in_children(self)
            signal.signal(signal.SIGTERM, self._handle)

    def end(self) -> None:
        """Give SIGTERM back; one that has come and was not obeyed ends the process now. Idempotent."""
        if self._handles and threading.current_thread() is threading.main_thread():
            self._handles = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._asked:
                os.kill(os.getpid(), signal.SIGTERM)

    def obey(self) -> None:
        """Raise `Terminated` if SIGTERM has come: a step is done, or can only go on in another epoch."""
        if self._asked:
            self._asked = False
            raise Terminated

    def reset_in_child(self) -> None:
        """Give SIGTERM back: a forked child has no part in the job."""
        if self._handles:
            self._handles = self._asked = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, _number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._asked = True
        if not self.in_steps:
            self.obey()
