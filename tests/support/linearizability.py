"""Checks whether the history of several users of a register's cell is linearizable.

The search of Wing and Gong ("Testing and Verifying Concurrent Objects", 1993) with Lowe's memory of tried states
("Testing for linearizability", 2017): take any operation that began before every other open one ended, check whether
the cell could have answered so, continue from there, and backtrack at a dead end.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.ft.registers import Cell, RegisterAway

Kind = Literal["read", "write"]
State = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class RegisterOperation:
    """An operation of a user between two times (seconds), and its answer.

    A read saw `version` and `value`. A write of `value` over `version` was done, was refused, or (None) got no answer:
    then it may have taken effect at any time after it began, or never.
    """

    kind: Kind
    version: int
    value: bytes
    began: float
    ended: float
    done: bool | None = True

    def after(self, state: State) -> Iterator[State]:
        """The states that a cell in `state` may be in after this operation; none if it could not answer so."""
        version, _ = state
        if self.kind == "read":
            if state == (self.version, self.value):
                yield state
        elif version == self.version:
            if self.done is not False:
                yield (version + 1, self.value)
        elif not self.done:
            yield state


def unexplained(history: Sequence[RegisterOperation]) -> RegisterOperation | None:
    """The first operation that no order of all operations explains; None if the history is linearizable.

    "First" means: the earliest that no search got past. Takes time proportional to the length of the history and, at
    worst, exponential in the number of operations open at once.
    """
    ops = sorted(history, key=lambda op: op.began)
    ends = [math.inf if op.done is None else op.ended for op in ops]
    definite = sum(1 << index for index, end in enumerate(ends) if end < math.inf)
    seen: set[tuple[int, State]] = set()
    todo: list[tuple[int, State]] = [(0, (0, b""))]
    furthest = 0
    while todo:
        taken, state = todo.pop()
        if taken & definite == definite:
            return None
        low = ((taken + 1) & ~taken).bit_length() - 1  # the first that is not taken
        furthest = max(furthest, low)
        horizon = math.inf
        for index in range(low, len(ops)):
            if ops[index].began > horizon:
                break
            if taken >> index & 1:
                continue
            horizon = min(horizon, ends[index])
            for following in ops[index].after(state):
                step = (taken | 1 << index, following)
                if step not in seen:
                    seen.add(step)
                    todo.append(step)
    return ops[furthest]


class OperationRecorder:
    """Uses a cell and records its operations in `history`. For one thread."""

    def __init__(self, cell: Cell) -> None:
        self.history: list[RegisterOperation] = []
        self._cell = cell

    def read(self) -> int | None:
        """Read; returns the version, None if the register is away."""
        began = time.monotonic()
        try:
            version, value = self._cell.read()
        except RegisterAway:
            return None
        self.history.append(RegisterOperation("read", version, value, began, time.monotonic()))
        return version

    def write(self, expected: int, value: bytes) -> bool | None:
        """Try to write; returns whether it was done, None if the register is away."""
        began = time.monotonic()
        done: bool | None = None
        with contextlib.suppress(RegisterAway):
            done = self._cell.compare_and_set(expected, value)
        self.history.append(RegisterOperation("write", expected, value, began, time.monotonic(), done))
        return done

    def work(self, name: str, seconds: float, most: int = 300, over: threading.Event | None = None) -> None:
        """Read, and try to write the next version, for `seconds`, until `over`, and at most `most` times."""
        deadline = time.monotonic() + seconds
        for number in range(most):
            version = self.read()
            if time.monotonic() >= deadline or (over is not None and over.is_set()):
                return
            if version is None:
                time.sleep(0.01)
                continue
            self.write(version, f"{name}.{number}".encode())
