"""Restores the signals that a shell ignores for background jobs, so that children of tests react to them."""

from __future__ import annotations

import signal

FOR_JOBS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""The signals that shells and nohup may ignore."""


def restore() -> None:
    """React to these signals as a program in the foreground does, also in programs that this one starts."""
    for number in FOR_JOBS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
