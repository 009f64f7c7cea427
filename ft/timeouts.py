"""All timeouts of a job in one object, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass, fields

from holdfast.comms.quantities import seconds


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds.

    `heartbeat`: the interval of a process's signs of life. `suspect`: how long it may be silent before it is checked.
    `operation`: the longest that one collective may take, and that members may wait for a member that still computes.
    `rebuild`: the longest from a failure to the next epoch. `join`: how long a job waits for members that it needs.

    Raises ValueError, with the reason, for values that cannot work together.
    """

    heartbeat: float = 0.1
    suspect: float = 0.5
    operation: float = 30.0
    rebuild: float = 10.0
    join: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            try:
                value = seconds(given, f"timeout {field.name}")
            except TypeError as error:
                raise ValueError(str(error)) from None
            except ValueError:
                value = 0.0
            if not value > 0:
                raise ValueError(f"timeout {field.name}={given!r} must be finite and above 0 seconds")
            object.__setattr__(self, field.name, value)
        if self.suspect < 2 * self.heartbeat:
            raise ValueError(
                f"suspect={self.suspect} s must be at least twice heartbeat={self.heartbeat} s: "
                "one late heartbeat would make a healthy process suspect"
            )
        if self.rebuild <= self.suspect:
            raise ValueError(
                f"rebuild={self.rebuild} s must exceed suspect={self.suspect} s: "
                "a second failure during a rebuild could not be noticed in time"
            )
        if self.operation <= self.suspect:
            raise ValueError(
                f"operation={self.operation} s must exceed suspect={self.suspect} s: "
                "operations would time out before a stopped peer is found"
            )
        if self.join <= self.heartbeat:
            raise ValueError(f"join={self.join} s must exceed heartbeat={self.heartbeat} s: nobody could join in time")
