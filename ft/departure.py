"""Leave a job that is not over: with all members, by a user's exception, or at SIGTERM.

The exceptions of user code are kept in a cell of the job's register, so that a repeated one ends the job: a spare that
repeats the step may have joined after the first. SIGTERM is a request to leave: schedulers send it before they take a
process away. A session finishes its step, tells the others that it leaves, and ends the process with status 143.
Outside of a step it leaves at once. A second SIGTERM ends the process as if it had no handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Literal

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData, HoldfastError, valid_text
from holdfast.comms.system import forks
from holdfast.ft.control.errors import KeyTimeout
from holdfast.ft.membership.events import LocalFailed, LocalFinished
from holdfast.ft.membership.view import StepError, View
from holdfast.ft.node.runtime import Runtime
from holdfast.ft.registers import RegisterAway, change_cell, open_cell
from holdfast.ft.step_protocol import FAILURES

CELL = "errors"
"""The name of the cell in the register."""

KEPT = 64
"""The number of newest exceptions that are kept."""
MOST_TEXT = 1000
"""Characters of an exception's message, and of its place."""

_decoder = msgspec.msgpack.Decoder(list[StepError])


def step_error(error: BaseException, step: int, rank: int) -> StepError:
    """The record of an exception that was raised in `step` on `rank`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown place"
    return StepError(
        step, rank, type(error).__qualname__, valid_text(str(error), MOST_TEXT), valid_text(place, MOST_TEXT)
    )


def note_error(register: str, error: StepError) -> bool:
    """Record `error` in the register at this URL; return whether it repeats one that is there already.

    Raises `RegisterAway`, `CorruptData`.
    """
    repeats = False

    def add(value: bytes) -> bytes:
        nonlocal repeats
        try:
            known = _decoder.decode(value) if value else []
        except UNDECODABLE as damaged:
            raise CorruptData(f"the exceptions in register {register} cannot be read: {damaged}") from damaged
        repeats = any(error.repeats(other) for other in known)
        return value if repeats else msgspec.msgpack.encode([*known, error][-KEPT:])

    with contextlib.closing(open_cell(register, CELL)) as cell:
        change_cell(register, cell.read, cell.compare_and_set, add)
    return repeats


TERMINATED = 128 + signal.SIGTERM
"""The exit status of a process that left because it was asked to, as that of a shell."""


class Terminated(SystemExit):
    """SIGTERM asked this process to leave its job, and it has finished its step. Ends the process with status 143.

    No `HoldfastError`: like KeyboardInterrupt it passes through `except Exception`.
    """

    def __init__(self) -> None:
        super().__init__(TERMINATED)

    def __str__(self) -> str:
        return "SIGTERM asked this process to leave"


class TerminationRequest:
    """Handles SIGTERM for a session from `begin` to `end`. While the process is `in_steps`, it leaves at `obey`."""

    def __init__(self) -> None:
        self.in_steps = False
        self.asked = False
        """Whether SIGTERM has come and is not obeyed yet."""
        self._handles = False

    def begin(self) -> None:
        """Take SIGTERM over, in the main thread of a program that has no handler of its own for it."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._handles = True
            forks.reset_in_children(self)
            signal.signal(signal.SIGTERM, self._handle)

    def end(self) -> None:
        """Give SIGTERM back; one that has come and was not obeyed ends the process now. Idempotent."""
        if self._handles and threading.current_thread() is threading.main_thread():
            self._handles = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.asked:
                os.kill(os.getpid(), signal.SIGTERM)

    def obey(self) -> None:
        """Raise `Terminated` if SIGTERM has come: a step is done, or can only go on in another epoch."""
        if self.asked:
            self.asked = False
            raise Terminated

    def reset_in_child(self) -> None:
        """Give SIGTERM back: a forked child has no part in the job."""
        if self._handles:
            self._handles = self.asked = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, _number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.asked = True
        if not self.in_steps:
            self.obey()


OnError = Literal["raise", "replace"]

LOOK_SECONDS = 0.05
"""Seconds between two checks of whether the other members have stopped too, or go on."""


def stop_with_all(runtime: Runtime, view: View, newcomers: Iterable[int], why: str) -> bool:
    """Declare the job finished before its last step if all members of `view` leave it here; return whether it is.

    The ranks of `newcomers`, which wait for the state, are not asked: they have done no step. False as soon as another
    member is seen to go on, or after the `operation` timeout.
    """
    guard, timeouts = runtime.epoch_guard, runtime.settings.timeouts
    wanted = set(view.ranks) - {view.members[rank].id for rank in newcomers}
    deadline = time.monotonic() + timeouts.operation
    try:
        while view.phase == "running":
            wanted &= view.ranks.keys()
            if _all_have_stopped(runtime, view, wanted, deadline):
                runtime.feed(LocalFinished(view.epoch, why, stopped=True))
            elif not guard.is_over(view.epoch):
                return False
            view = guard.wait(view.epoch, timeouts.rebuild + timeouts.join)
    except HoldfastError:
        return False
    return view.phase == "finished"


def _all_have_stopped(runtime: Runtime, view: View, wanted: set[str], deadline: float) -> bool:
    """Whether all `wanted` members stop in the epoch of `view`; False if it ends before, or a member goes on."""
    try:
        store = runtime.store(view)
        store.set(f"stopped/{runtime.identity}", "")
        while time.monotonic() < deadline and not runtime.node.another_continues(wanted):
            with contextlib.suppress(KeyTimeout):
                store.wait([f"stopped/{member}" for member in sorted(wanted)], timedelta(seconds=LOOK_SECONDS))
                return True
    except FAILURES:
        runtime.epoch_guard.wait_over(view.epoch, LOOK_SECONDS)
    return False


def end_with(runtime: Runtime, view: View, error: BaseException, known: StepError, on: OnError) -> bool:
    """End the job with `error`, if `on` asks for that or the same exception has come before.

    Returns whether the job ended. The other members get the error as `known`. An error that follows from the death of a
    peer ends no job.
    """
    if not isinstance(error, Exception) or any(isinstance(each, FAILURES) for each in _chain(error)):
        return False
    try:
        again = note_error(runtime.settings.register, known)
    except (RegisterAway, CorruptData):
        return False
    if on == "replace" and not again:
        return False
    runtime.feed(LocalFailed(known, f"{'the same exception came again' if again else 'an exception'}: {known}"))
    with contextlib.suppress(HoldfastError):  # `wait` raises at the end of the job
        while view.phase == "running":
            view = runtime.epoch_guard.wait(view.epoch, runtime.settings.timeouts.rebuild)
    newest = runtime.epoch_guard.view
    return newest is not None and newest.phase == "failed"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, then its causes and contexts."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        each = each.__cause__ or each.__context__
