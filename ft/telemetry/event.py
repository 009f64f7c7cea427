"""The events of a job's processes, as checkers read them from the event logs.

Each process writes JSON lines to a file of its own in the log directory. A line is an object with `time`
(seconds on CLOCK_MONOTONIC), `process`, `pid`, `kind`, and the fields of its kind. The kinds that checkers
read:

    installed(epoch, members, rank)     this process is in the view of the epoch; members in rank order
    spare(epoch, to)                    it waits as a spare, and announces that to the members `to`
    welcomed(spare)                     it knows of a waiting spare
    proposed(epoch)                     it asks the register to begin the epoch
    revoked(epoch)                      it ends its work in the epoch
    attempt(step, epoch)                it begins a step
    prepared(step, epoch)               its part of the step is done
    committed(step, epoch, how)         the step is committed
    aborted_step(step, epoch)           the attempt is undone
    synced(step, epoch)                 it got the state after the step from other ranks (-1: before the first step)
    finished, error                     the process ended, well or with an error
    op(op, seq, epoch, seconds, ...)    an op ended; `error` is its error, if any, `timeout` its limit (seconds)
    any with step and digest            a checksum of the state that the process holds after the step
    detected(members)                   it knows that other members are gone
    fault(what, target)                 the harness injected a fault
    suspected, cleared(member)          it no longer hears a member of another host, or hears it again
    simulated(ranks, hosts)             a simulation begins; the simulator logs the fate of every process
    died(why), stopped(seconds)         the simulator ended or stopped a process
    broken(error)                       its membership core raised
    horizon(seconds)                    a simulation ends, this long after the end of the last fault
    published, fetched, retired, lost   (version) what became of a version of the weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.comms.errors import CorruptData


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a log. `time` is in seconds on CLOCK_MONOTONIC, which all processes of a host share."""

    time: float
    process: str
    pid: int
    kind: str
    fields: Mapping[str, object]

    def integer(self, name: str) -> int:
        """The field as a whole number. Raises `CorruptData` if it is missing or of another type."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CorruptData(f"{self.kind} of {self.process}: field {name!r} is {value!r}, not a whole number")
        return value

    def number(self, name: str) -> float:
        """The field as a number. Raises `CorruptData` if it is missing or of another type."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CorruptData(f"{self.kind} of {self.process}: field {name!r} is {value!r}, not a number")
        return float(value)

    def text(self, name: str, default: str = "") -> str:
        """The field as text; `default` if it is missing."""
        value = self.fields.get(name)
        return default if value is None else str(value)

    def names(self, name: str) -> tuple[str, ...]:
        """The field as a tuple of names. Raises `CorruptData` if it is missing or of another type."""
        value = self.fields.get(name)
        if type(value) is tuple:
            return value
        if not isinstance(value, list):
            raise CorruptData(f"{self.kind} of {self.process}: field {name!r} is {value!r}, not a list")
        return tuple(str(item) for item in value)


def event_of(line: Mapping[str, object]) -> Event:
    """The event of a decoded line. Raises `CorruptData` if a field that all events have is missing or wrong."""
    fields = dict(line)
    try:
        time, process, pid, kind = (fields.pop(name) for name in ("time", "process", "pid", "kind"))
    except KeyError as error:
        raise CorruptData(f"an event without {error}: {dict(line)!r}") from None
    if (
        isinstance(time, bool)
        or not isinstance(time, int | float)
        or not isinstance(process, str)
        or not isinstance(pid, int)
        or not isinstance(kind, str)
    ):
        raise CorruptData(f"an event whose time, process, pid or kind is of the wrong type: {dict(line)!r}")
    return Event(float(time), process, pid, kind, fields)
