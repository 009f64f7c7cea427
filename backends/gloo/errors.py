"""Classify the errors of gloo, and of torch around it: RuntimeErrors that differ only in their text."""

from __future__ import annotations

import re
from typing import Literal

Meaning = Literal["timeout", "connection", "local"]

_LATE = re.compile(r"\btimed out\b|wait timeout|Application timeout caused pair closure", re.IGNORECASE)
_KERNEL_LATE = "Connection timed out"
_OF_CONNECTIONS = re.compile(
    r"gloo/(transport|rendezvous)/|Connection (closed|reset|refused|timed out)|Broken pipe|Socket closed"
    r"|endpoint is not connected|connectFullMesh|(No route to|unreachable|is down)"
)


def meaning_of(error: RuntimeError) -> Meaning:
    """Whether an op took too long, lost a connection, or failed in this process by no peer's fault."""
    text = str(error)
    if _LATE.search(text) and _KERNEL_LATE not in text:
        return "timeout"
    return "connection" if _OF_CONNECTIONS.search(text) else "local"
