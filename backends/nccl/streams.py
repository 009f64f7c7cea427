"""Asynchronous ops on a side stream of the device; a handle makes other streams wait for them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from holdfast.comms.errors import StillRunning
from holdfast.comms.system.waiting import Wait
from holdfast.comms.work import Work

LONGEST_SECONDS = 1e8
_LOOKS = Wait(yields=0, sleep_seconds=0.0005)
_cuda: Any = torch.cuda  # streams and events have no types
Event = Any


class StreamWork(Work):
    """An op that is queued on a stream of `device`. `wait` makes the current stream wait for it, and returns at once.

    With a timeout, `wait` blocks until the device has finished it, as torch's own work does. `failed` raises what has
    ended the transport since, and so does a wait.
    """

    __slots__ = ("_device", "_event", "_failed")

    def __init__(self, name: str, device: torch.device, event: Event, failed: Callable[[], None]) -> None:
        self._name, self._callbacks = name, []  # without the lock that a thread's work has
        self._error = self.seconds = None
        self._device = device
        self._event = event
        self._failed = failed

    def wait(self, timeout: float | None = None) -> None:
        self._failed()
        _cuda.current_stream(self._device.index).wait_event(self._event)
        if timeout is None:
            return
        if not wait_for(self._event, time.monotonic() + timeout, self._failed):
            raise StillRunning(self._name, timeout)

    def done(self) -> bool:
        return bool(self._event.query())

    def add_done_callback(self, function: Callable[[Work], object]) -> None:
        """As of any work. A thread waits for the device: no thread of this process completes the op."""
        super().add_done_callback(function)
        if self._callbacks:
            threading.Thread(target=self._call_back_when_done, name="holdfast-callbacks", daemon=True).start()

    def _call_back_when_done(self) -> None:
        _LOOKS.reaches(lambda: self.done() or self.exception() is not None, math.inf)
        self._call_back()

    def exception(self) -> BaseException | None:
        try:
            self._failed()
        except BaseException as error:
            return error
        return None


class SideStream:
    """The stream of one transport's asynchronous ops."""

    def __init__(self, device: torch.device, failed: Callable[[], None]) -> None:
        self._device = device
        self._failed = failed
        self._stream = _cuda.Stream(device)
        self._begin = _cuda.Event()
        """Where the current stream was at the newest launch."""
        self._running: deque[tuple[Event, Callable[[], None]]] = deque()

    def launch(self, name: str, op: Callable[[], None]) -> Work:
        """Run `op()` with the side stream current, after what the current stream holds.

        The tensors of `op` are kept until the device has finished it: until then their memory must not be reused.

        torch looks for the number of a `torch.device` for some 10 us, and as long for `torch.cuda.stream`.
        """
        stream = self._stream
        self._begin.record(_cuda.current_stream(self._device.index))
        stream.wait_event(self._begin)
        with stream:
            op()
            event = _cuda.Event()
            event.record(stream)
            capturing = _cuda.is_current_stream_capturing()
        if not capturing:
            while self._running and self._running[0][0].query():
                self._running.popleft()
            self._running.append((event, op))
        return StreamWork(name, self._device, event, self._failed)

    def wait(self, deadline: float) -> bool:
        """Block until the device has finished the ops that were launched; False at the deadline."""
        return not self._running or wait_for(self._running[-1][0], deadline, self._failed)

    def entered(self) -> AbstractContextManager[Any]:
        """Make this stream current in the thread that enters."""
        return self._stream  # type: ignore[no-any-return]

    def release(self) -> None:
        """Release the tensors of the ops."""
        self._running.clear()


def passed(device: torch.device) -> Event:
    """Record an event after all that the current stream holds now."""
    event = _cuda.Event()
    event.record(_cuda.current_stream(device))
    return event


def wait_for(event: Event, deadline: float, failed: Callable[[], None]) -> bool:
    """Block until the device has passed `event`; False at the deadline. Raises what `failed` raises."""
    return _LOOKS.reaches(event.query, deadline, failed)


def until(deadline: float) -> timedelta:
    """The time left until `deadline`, as `within` gives it to torch."""
    return within(deadline - time.monotonic())


def within(seconds: float) -> timedelta:
    """That time, at least a millisecond, at most what torch can represent."""
    return timedelta(seconds=min(max(seconds, 0.001), LONGEST_SECONDS))
