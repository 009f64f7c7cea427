"""Probes whether this process may make a Linux system call, by making it on itself.

A container profile (seccomp) can forbid a call that the kernel and Python have, so its existence proves nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from holdfast.comms.errors import HoldfastError
from holdfast.comms.plugins.spec import Unavailable


def _memfd_create() -> None:
    os.close(os.memfd_create("holdfast-probe", os.MFD_CLOEXEC))


def _pidfd_open() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _pidfd_send_signal() -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)


_CALLS: dict[str, tuple[Callable[[], None], str]] = {
    "memfd_create": (_memfd_create, "Linux 3.17"),
    "pidfd_open": (_pidfd_open, "Linux 5.3"),
    "pidfd_send_signal": (_pidfd_send_signal, "Linux 5.1"),
}


class CallRefused(HoldfastError):
    """The kernel refuses a call to this process without which it cannot go on; the message says what to allow."""


def require(what: str, *names: str) -> None:
    """Raise `CallRefused` if one of these calls, which `what` needs, fails here."""
    if (wrong := refused(*names)) is not None:
        raise CallRefused(f"{what} cannot be done here: {wrong.reason}; {wrong.install_hint}")


def refused(*names: str) -> Unavailable | None:
    """Why the first of these calls that fails here does, and what to allow; None if all work."""
    for name in names:
        call, since = _CALLS[name]
        try:
            call()
        except AttributeError:
            return Unavailable(f"this Python has no {name}", f"it needs {since}")
        except OSError as error:
            hint = f"it needs {since} and, in a container, a seccomp profile that allows {name}"
            return Unavailable(f"{name} fails: {error.strerror}", hint)
    return None
