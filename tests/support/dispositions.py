"""Signal dispositions: what a shell ignores for its jobs in the background is not ignored by the tests' children."""

from __future__ import annotations

import signal

FOR_JOBS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""What shells and nohup may ignore."""


def restore() -> None:
    """React to these signals as a program in the foreground does; so do the programs that this one starts."""
    for number in FOR_JOBS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
