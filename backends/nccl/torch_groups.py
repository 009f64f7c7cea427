"""torch's group over NCCL or RCCL: which one this torch takes for "nccl", how it is made, called and ended.

torch has two. The older one is called "nccl-legacy" since there is another, "nccl2", which came from TorchComms: torch
2.14 takes it if TORCH_DIST_USE_NCCL2 is "1", torch 2.15 unless it is "0". Here it is the same one that
`init_process_group("nccl")` would make.

torch reads most of its environment variables when a group is made, so they are set only for that moment. By default
torch's watchdog sleeps for a minute after a failure and then ends the process, and a monitor ends every process that
sees a failure of any group that shares its store, even of an earlier epoch. Here a failed op ends its group.

NCCL keeps an open group of calls per thread: all later calls of that thread wait until the group ends. An exception in
between would leave it open, and the ops of the next communicator would never start.

NCCL's abort takes half a second, so groups end beside the program (`BackgroundEnds`), while the next communicator
connects and its ops run. Each end has a deadline, and at most `MOST` run at once. What has not ended by its deadline is
reported and left behind; `MOST` of those, and this process makes no further group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.backends.nccl.streams import until
from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.environment import flag, set_meanwhile
from holdfast.comms.system.signal_safety import run_shielded
from holdfast.comms.system.waiting import run_within
from holdfast.comms.transport.base import Context

LEGACY, NCCL2 = "nccl-legacy", "nccl2"
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
MOST = 4
"""The number of groups that end at once, and of groups that may be left behind."""

# -- making a group


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


def kind_of_group() -> str:
    """The name of the group that this torch takes for "nccl": `LEGACY` or `NCCL2`."""
    if not hasattr(dist, "ProcessGroupNCCL2"):
        return LEGACY
    asked = os.environ.get(USE_NCCL2)
    return (LEGACY if asked == "0" else NCCL2) if _connects_lazily_by_option() else (NCCL2 if asked == "1" else LEGACY)


def _connects_lazily_by_option() -> bool:
    """Whether nccl2 has the option `lazy_init`, which came with the torch that takes nccl2 by default."""
    return hasattr(dist.ProcessGroupNCCL.Options, "lazy_init")


def blocks() -> bool:
    """Whether a call lasts until NCCL has connected the ranks: as of the older group by default.

    Without blocking, NCCL starts a thread for each op: 130 us of host time more with two ranks (H200, NCCL 2.28).
    """
    return kind_of_group() == LEGACY and not flag(NONBLOCKING)


def make_group(context: Context, device: torch.device) -> Any:
    """Make a group that connects with its first op; its watchdog ends the group, not the process.

    Both kinds could connect eagerly, in their constructor, which nothing could end. Connecting with the first op is
    bounded: for nccl2, which does not block, by the time left to `context.deadline`. For the older one the caller
    leaves the op behind (`NcclTransport.connect_ranks`); without blocking, `bound_handshakes` ends it there.
    The user's own TORCH_NCCL_USE_COMM_NONBLOCKING takes precedence.
    """
    of_torch: Any = dist.ProcessGroupNCCL
    options = of_torch.Options()
    options._timeout = until(context.deadline)
    older = kind_of_group() == LEGACY
    if not older and NONBLOCKING not in os.environ:
        options.config.blocking = 0
    for name, value in context.hints.items():
        setattr(options.config, name, int(value))
    if older:
        bound_handshakes()
        with settings_of_a_group():
            return of_torch(context.store, context.rank, context.size, options)
    bound = (device,) if _connects_lazily_by_option() else ()  # before that option the first tensor told the device
    if bound:
        options.lazy_init = True
    newer: Any = getattr(dist, "ProcessGroupNCCL2")  # noqa: B009  # which the torch that types are checked with lacks
    with settings_of_a_group():
        return newer(context.store, context.rank, context.size, options, *bound)


def set_timeout(group: Any, seconds: float) -> None:
    """Set the timeout of the ops that `group` starts from now on."""
    change = getattr(group, "_set_default_timeout", None) or group.set_timeout  # nccl2 has only the latter
    change(timedelta(seconds=seconds))


# -- calling a group


class ThisThread(threading.local):
    """What is known of the calling thread."""

    left_open = False
    """A group of NCCL was left open here."""


this_thread = ThisThread()


def run_as_group(group: Any, ops: Callable[[], None]) -> Any:
    """Run `ops()`, sends and receives of torch's `group`, as one group call. The group is closed even on an error."""
    group._start_coalescing()
    try:
        ops()
        return group._end_coalescing()
    except BaseException:
        if not any(_closed(group, close) for close in ("_end_coalescing", "_group_end")):
            this_thread.left_open = True
        raise


def _closed(group: Any, close: str) -> bool:
    try:
        getattr(group, close)()
    except Exception:
        return False
    return True


def marks_open_group(call: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a call that opens a group inside torch, which no caller can close if the call fails midway."""

    def marked(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError:
            this_thread.left_open = True
            raise

    return marked


class CallingThread:
    """Runs calls in a thread without an open group.

    That is the calling thread, or a new one if a group was left open there.
    """

    def __init__(self, entering: Callable[[], Callable[[], contextlib.AbstractContextManager[Any]]]) -> None:
        """`entering()`, called in the calling thread, returns what to enter in the other: its device and stream."""
        self._entering = entering
        self._other: ThreadPoolExecutor | None = None

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if not this_thread.left_open:
            return call(*arguments)
        entered = self._entering()

        def there() -> Any:
            with entered():
                return call(*arguments)

        if self._other is None:
            self._other = ThreadPoolExecutor(1, "holdfast-nccl")
        return self._other.submit(there).result()

    def close(self) -> None:
        if self._other is not None:
            self._other.shutdown(wait=False)


# -- ending groups


class BackgroundEnds:
    """Ends groups in threads. `begin` may be called from any thread, and from a signal's handler."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._turns: queue.SimpleQueue[None] = queue.SimpleQueue()  # has no lock that a signal's handler could need
        for _ in range(most):
            self._turns.put(None)
        self._left_behind: list[Any] = []
        """What must outlive the ends that did not come: the device may still use it."""

    @property
    def left_behind(self) -> int:
        """The number of groups that had not ended by their deadline."""
        return len(self._left_behind)

    def begin(self, end: Callable[[], object], seconds: float, kept: tuple[Any, ...]) -> None:
        """Call `end()` in a thread, and keep `kept` until it has returned.

        If `MOST` are under way, this waits until one of them has ended, or has been left behind: `seconds` at most.
        """
        try:
            self._turns.get(timeout=seconds)
        except queue.Empty:
            _log.error("no group of NCCL ended within %g s: another one is not aborted, but left behind", seconds)
            self._left_behind.append((end, kept))
            return

        def run() -> None:
            try:
                if isinstance(failure_of_end(seconds, "abort", end), TimeoutError):
                    self._left_behind.append((end, kept))
            finally:
                self._turns.put(None)

        run_shielded(threading.Thread(target=run, name="holdfast-nccl-end").start)

    def check(self) -> None:
        """Raise HoldfastError if so many groups were left behind that this process should make no further one."""
        if self.left_behind >= self._most:
            raise HoldfastError(
                f"{self.left_behind} groups of NCCL in this process did not end after their abort, and hold memory and "
                "threads of its GPU: end this process, and let a spare take its place"
            )


def failure_of_end(seconds: float, what: str, call: Callable[[], object]) -> Exception | None:
    """Run `call()`, of torch's group: None if it has ended within `seconds`, else its error.

    That is a TimeoutError if it has not ended; it is abandoned then.
    """
    try:
        run_within(seconds, call)
    except TimeoutError as error:
        _log.warning("%s of a NCCL group takes longer than %g s: left behind", what, seconds)
        return error
    except Exception as error:
        _log.warning("%s of a NCCL group failed: %s", what, str(error).splitlines()[:1])
        return error
    return None


ends = BackgroundEnds()
"""Those of this process."""
