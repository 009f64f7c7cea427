"""Environment variables: those that are on or off, or an address; and those that are set for a moment."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections.abc import Callable, Iterator, Mapping

ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")

_setting = threading.Lock()


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


@contextlib.contextmanager
def set_meanwhile(values: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Set environment variables for a block: some libraries are told in no other way. One block at a time.

    `values()` is called when no other block has set any.
    """
    with _setting:
        ours = values()
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
