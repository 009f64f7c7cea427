"""Leave a job that is not over: with all other members before the last step, or by a user's exception."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

from holdfast.comms.errors import CorruptData, HoldfastError
from holdfast.ft import error_history
from holdfast.ft.attempt import FAILURES
from holdfast.ft.control.errors import KeyTimeout
from holdfast.ft.membership.events import LocalFailed, LocalFinished
from holdfast.ft.membership.view import StepError, View
from holdfast.ft.node.epoch_guard import EpochGuard
from holdfast.ft.node.runtime import Runtime
from holdfast.ft.registers import RegisterAway
from holdfast.ft.settings import Settings

OnError = Literal["raise", "replace"]

LOOK_SECONDS = 0.05
"""Seconds between two checks of whether the other members have stopped too, or go on."""


def stop_with_all(
    runtime: Runtime, epoch_guard: EpochGuard, settings: Settings, identity: str, view: View, why: str
) -> bool:
    """Declare the job finished before its last step if all members of `view` leave it here; return whether it is.

    False as soon as another member is seen to go on, or after the `operation` timeout.
    """
    timeouts = settings.timeouts
    wanted, deadline = set(view.ranks), time.monotonic() + timeouts.operation
    try:
        while view.phase == "running":
            wanted &= view.ranks.keys()
            if _all_have_stopped(runtime, epoch_guard, identity, view, wanted, deadline):
                runtime.feed(LocalFinished(view.epoch, why, stopped=True))
            elif not epoch_guard.is_over(view.epoch):
                return False
            view = epoch_guard.wait(view.epoch, timeouts.rebuild + timeouts.join)
    except HoldfastError:
        return False
    return view.phase == "finished"


def _all_have_stopped(
    runtime: Runtime, epoch_guard: EpochGuard, identity: str, view: View, wanted: set[str], deadline: float
) -> bool:
    """Whether all `wanted` members stop in the epoch of `view`; False if it ends before, or a member goes on."""
    try:
        store = runtime.store(view)
        store.set(f"stopped/{identity}", "")
        while time.monotonic() < deadline and not runtime.node.another_continues():
            with contextlib.suppress(KeyTimeout):
                store.wait([f"stopped/{member}" for member in sorted(wanted)], timedelta(seconds=LOOK_SECONDS))
                return True
    except FAILURES:
        epoch_guard.wait_over(view.epoch, LOOK_SECONDS)
    return False


def end_with(
    runtime: Runtime,
    epoch_guard: EpochGuard,
    settings: Settings,
    view: View,
    error: BaseException,
    known: StepError,
    on: OnError,
) -> bool:
    """End the job with `error`, if `on` asks for that or the same exception has come before.

    Returns whether the job ended. The other members get the error as `known`. An error that follows from the death of a
    peer ends no job.
    """
    if not isinstance(error, Exception) or any(isinstance(each, FAILURES) for each in _chain(error)):
        return False
    try:
        again = error_history.note(settings.register, known)
    except (RegisterAway, CorruptData):
        return False
    if on == "replace" and not again:
        return False
    runtime.feed(LocalFailed(known, f"{'the same exception came again' if again else 'an exception'}: {known}"))
    with contextlib.suppress(HoldfastError):  # `wait` raises at the end of the job
        while view.phase == "running":
            view = epoch_guard.wait(view.epoch, settings.timeouts.rebuild)
    newest = epoch_guard.view
    return newest is not None and newest.phase == "failed"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, then its causes and contexts."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        each = each.__cause__ or each.__context__
