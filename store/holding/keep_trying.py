"""The loop of a thread in the background: whatever goes wrong, it goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from holdfast.comms.errors import HoldfastError

_log = logging.getLogger("holdfast.store")


def keep_trying(
    turn: Callable[[], object], closing: threading.Event, what: str, pause: float, longer_pause: float
) -> None:
    """Call `turn` again and again until `closing`.

    After a `HoldfastError`, of which the first in a row is logged, the next turn comes `pause` seconds later; after any
    other error, `longer_pause`.
    """
    failing = False
    while not closing.is_set():
        try:
            turn()
            failing = False
        except HoldfastError as error:
            if not (failing or closing.is_set()):
                _log.warning("%s goes on trying: %s", what, error)
            failing = True
            closing.wait(pause)
        except Exception:
            _log.exception("%s goes on trying", what)
            closing.wait(longer_pause)
