"""Set the environment variables of torch's ProcessGroupNCCL so that a failed op ends its group, not the process.

torch reads most of them when a group is made, so they are set only for that moment. By default torch's watchdog sleeps
for a minute after a failure and then ends the process, and a monitor ends every process that sees a failure of any
group that shares its store, even of an earlier epoch.
"""

from __future__ import annotations

import contextlib
import logging
import os

from holdfast.comms.system.environment import set_meanwhile

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
_UNLESS_SET = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
NONBLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
LONGEST_WAIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
HANDSHAKE_SECONDS = "300"
USE_NCCL2 = "TORCH_DIST_USE_NCCL2"
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"

_log = logging.getLogger("holdfast.nccl")
_said: set[str] = set()


def settings_of_a_group() -> contextlib.AbstractContextManager[None]:
    """Set the variables while a group is made. Values of the user stay, and are logged, unless they affect failures."""
    return set_meanwhile(_values)


def _values() -> dict[str, str]:
    before = os.environ.get(_ERROR_HANDLING)
    if before not in (None, _CLEAN_UP_ONLY):
        _log_once(
            f"{_ERROR_HANDLING}={before} is taken as {_CLEAN_UP_ONLY}: a failed op ends its group, not the process"
        )
    ours = {name: value for name, value in _UNLESS_SET.items() if name not in os.environ}
    for name in _UNLESS_SET.keys() - ours.keys():
        if os.environ[name] != _UNLESS_SET[name]:
            _log_once(f"{name}={os.environ[name]} stays so: torch may hold up, or end, this process after a failure")
    if os.environ.get(BLOCKING_WAIT, "0") not in ("", "0"):
        _log_once(f"{BLOCKING_WAIT} is set: torch has no watchdog then; timeouts are found only by waits")
    return {**ours, _ERROR_HANDLING: _CLEAN_UP_ONLY}


def bound_handshakes() -> None:
    """Bound how long torch's older group holds its lock while NCCL connects or ends. An abort waits for that lock.

    torch reads the bound once in a process, so it is the same for all communicators, and no communicator's timeout:
    each waits for its ranks by its own deadline before NCCL connects them.
    """
    os.environ.setdefault(LONGEST_WAIT, HANDSHAKE_SECONDS)


def _log_once(what: str) -> None:
    if what not in _said:
        _said.add(what)
        _log.warning("%s", what)
