"""`flag`: reads on/off environment variables."""

from __future__ import annotations

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
