"""Reads environment variables that are on or off, or an address."""

from __future__ import annotations

import contextlib
import ipaddress
import os

ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")


def flag(variable: str, default: bool = False) -> bool:
    """Whether an environment variable is on; `default` if it is not set.

    Raises ValueError for a value that is neither on nor off.
    """
    text = os.environ.get(variable)
    if text is None:
        return default
    word = text.strip().lower()
    if word not in (*ON, *OFF):
        raise ValueError(f"{variable}={text!r} is neither on ({', '.join(ON)}) nor off ({', '.join(OFF[1:])})")
    return word in ON


def own_address() -> str:
    """The address on which HOLDFAST_HOST or HOLDFAST_INTERFACE says to listen; "" if they say none, or another form."""
    text = os.environ.get("HOLDFAST_HOST") or os.environ.get("HOLDFAST_INTERFACE", "")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text))
    return ""
