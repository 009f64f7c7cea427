"""The merged event stream of a run: what all its processes wrote down, in the order of the host's clock.

Each process writes JSON lines to a file of its own in the log directory. A line is an object with `time`
(seconds on CLOCK_MONOTONIC), `process`, `pid`, `kind`, and the fields of its kind. The kinds that checkers
look at:

    installed(epoch, members, rank)     this process is in the view of the epoch; members in rank order
    spare(epoch, to)                    it waits outside for a place, and tells the members `to`
    welcomed(spare)                     it knows of one that waits
    proposed(epoch)                     it asks the register to begin the epoch
    revoked(epoch)                      it ends what it does in the epoch
    attempt(step, epoch)                it begins a step
    prepared(step, epoch)               its part of the step is done
    committed(step, epoch, how)         the step is done for good
    aborted_step(step, epoch)           the attempt is undone
    synced(step, epoch)                 it took over the state after the step from others (-1: before the first)
    finished, error                     the process ended, well or not
    op(op, seq, epoch, seconds, ...)    an op ended; `error` says how if not well, `timeout` is its limit (seconds)
    any with step and digest            what the process holds after the step, as a checksum
    detected(members)                   it knows that others are gone
    fault(what, target)                 the harness broke something on purpose
    suspected, cleared(member)          it does not hear a member of another host, or hears it again
    simulated(ranks, hosts)             a simulator begins, which logs what becomes of every process
    died(why), stopped(seconds)         what a simulator knows of a process
    broken(error)                       its membership core raised
    horizon(seconds)                    a simulation ends, so long after the last fault was over
    published, fetched, retired, lost   (version) what became of a version of the weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.comms.errors import CorruptData


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a log. `time` is in seconds on a clock that all processes of the host share."""

    time: float
    process: str
    pid: int
    kind: str
    fields: Mapping[str, object]

    def integer(self, name: str) -> int:
        """The field as a whole number. Raises `CorruptData` if it is not there or is another thing."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CorruptData(f"{self.kind} of {self.process}: field {name!r} is {value!r}, not a whole number")
        return value

    def number(self, name: str) -> float:
        """The field as a number. Raises `CorruptData` if it is not there or is another thing."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CorruptData(f"{self.kind} of {self.process}: field {name!r} is {value!r}, not a number")
        return float(value)

    def text(self, name: str, default: str = "") -> str:
        """The field as text; `default` if it is not there."""
        value = self.fields.get(name)
        return default if value is None else str(value)

    def names(self, name: str) -> tuple[str, ...]:
        """The field as a list of names. Raises `CorruptData` if it is not there or is another thing."""
        value = self.fields.get(name)
        if type(value) is tuple:
            return value
        if not isinstance(value, list):
            raise CorruptData(f"{self.kind} of {self.process}: field {name!r} is {value!r}, not a list")
        return tuple(str(item) for item in value)


def event_of(line: Mapping[str, object]) -> Event:
    """An event of a decoded line. Raises `CorruptData` if one of the fields that all events have is wrong."""
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
