"""The exit status of a process, in words."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    """How a process ended, in words; `code` is negative for a signal, as in `subprocess`."""
    if code >= 0:
        return f"exited with status {code}"
    known = {each.value: each.name for each in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"
