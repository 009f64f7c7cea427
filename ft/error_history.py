"""The exceptions that a job's user code has raised, so that a repeated one ends the job.

They are kept in a cell of the job's register: a spare that repeats the step may have joined after the first exception.
"""

from __future__ import annotations

import contextlib
import traceback

import msgspec

from holdfast.comms.errors import CorruptData, HoldfastError
from holdfast.ft.membership.view import StepError
from holdfast.ft.registers import change_cell, open_cell

CELL = "errors"
"""The name of the cell in the register."""

KEPT = 64
"""The number of newest exceptions that are kept."""
MOST_TEXT = 1000

_decoder = msgspec.msgpack.Decoder(list[StepError])


class StepFailed(HoldfastError):
    """The user's code raised `error` on another rank, and the job has ended with it."""

    def __init__(self, job: str, reason: str, error: StepError) -> None:
        self.job, self.error = job, error
        super().__init__(f"job {job!r} has ended: {reason}")


def describe(error: BaseException, step: int, rank: int) -> StepError:
    """The record of an exception that was raised in `step` on `rank`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown place"
    return StepError(step, rank, type(error).__qualname__, _text(str(error)), _text(place))


def note(register: str, error: StepError) -> bool:
    """Record `error` in the register at this URL; return whether it repeats one that is there already.

    Raises `RegisterAway`, `CorruptData`.
    """
    repeats = False

    def add(value: bytes) -> bytes:
        nonlocal repeats
        try:
            known = _decoder.decode(value) if value else []
        except (msgspec.DecodeError, UnicodeDecodeError) as damaged:
            raise CorruptData(f"the exceptions in register {register} cannot be read: {damaged}") from damaged
        repeats = any(error.repeats(other) for other in known)
        return value if repeats else msgspec.msgpack.encode([*known, error][-KEPT:])

    with contextlib.closing(open_cell(register, CELL)) as cell:
        change_cell(register, cell.read, cell.compare_and_set, add)
    return repeats


def _text(text: str) -> str:
    """The text, cut to `MOST_TEXT` characters and made valid Unicode."""
    return text[:MOST_TEXT].encode(errors="replace").decode()
