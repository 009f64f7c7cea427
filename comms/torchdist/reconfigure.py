"""Reads the arguments of `reconfigure`, as torch 2.14 passes them: the members of a group's next communicator."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from holdfast.comms.plugins.hints import Hints


@dataclass(frozen=True, slots=True)
class ReconfigureRequest:
    """The contents of torch's `ReconfigureOptions`: the members, as a list or a set, and a timeout in seconds."""

    uuid: int
    handles: Sequence[str] | Set[str]
    timeout: float | None
    hints: Hints | None


def parse_request(
    given: Any,
    handles: Sequence[str] | Set[str] | None,
    timeout: timedelta | float | None,
    hints: Hints | None,
) -> ReconfigureRequest:
    """Parse the arguments of `reconfigure(options)` or `reconfigure(uuid, handles, timeout, hints)`."""
    if handles is None:
        given, handles, timeout, hints = given.uuid, given.handles, given.timeout, given.hints
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return ReconfigureRequest(int(given), handles, seconds, hints or None)
