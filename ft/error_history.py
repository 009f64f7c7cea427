"""The exceptions of a user's code that a job has seen, so that one that comes again ends the job.

They are kept in a cell of the job's register: a spare that does the step again may have joined after the first one.
"""

from __future__ import annotations

import traceback

import msgspec

from holdfast.comms.errors import CorruptData, HoldfastError
from holdfast.ft.membership.step_error import StepError
from holdfast.ft.registers import open_cell

CELL = "errors"
"""The name of the cell."""

KEPT = 64
"""The most exceptions that are remembered."""
MOST_TEXT = 1000

_decoder = msgspec.msgpack.Decoder(list[StepError])


class StepFailed(HoldfastError):
    """The user's code raised `error` on another rank, and the job has ended with it."""

    def __init__(self, job: str, reason: str, error: StepError) -> None:
        self.job, self.error = job, error
        super().__init__(f"job {job!r} has ended: {reason}")


def describe(error: BaseException, step: int, rank: int) -> StepError:
    """What to remember of an exception that was raised in `step` on `rank`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown place"
    return StepError(step, rank, type(error).__qualname__, _text(str(error)), _text(place))


def note(register: str, error: StepError) -> bool:
    """Remember `error` in the register at this URL; whether it repeats one that was there already.

    Raises `RegisterAway`, `CorruptData`.
    """
    cell = open_cell(register, CELL)
    try:
        while True:
            version, value = cell.read()
            try:
                known = _decoder.decode(value) if version else []
            except (msgspec.DecodeError, UnicodeDecodeError) as damaged:
                raise CorruptData(f"the exceptions in register {register} cannot be read: {damaged}") from damaged
            if any(error.repeats(other) for other in known):
                return True
            if cell.compare_and_set(version, msgspec.msgpack.encode([*known, error][-KEPT:])):
                return False
    finally:
        cell.close()


def _text(text: str) -> str:
    """As it can be sent: short enough, and valid Unicode."""
    return text[:MOST_TEXT].encode(errors="replace").decode()
