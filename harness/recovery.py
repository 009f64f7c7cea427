"""Reads a recovery off the events of a job: what real processes logged, or simulated ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.comms.errors import HoldfastError
from holdfast.ft import events
from holdfast.ft.events import Event

DETECTED = (
    events.DeathsDetected
    | events.MemberSuspected
    | events.MemberFenced
    | events.HoldersDied
    | events.HostAway
    | events.ReplicaCorrupt
    | events.RoleLost
)
"""Events that show that a process knows of a fault."""


class NotRecovered(HoldfastError):
    """A job did not recover from a fault in time."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What followed a fault, on the clock of the events. None, or a process without an entry: it did not happen.

    `detected` is when the first process knew of it, `replaced` when another one did the work of a lost holder or role.
    `members` are those of the next view. By process: when it had that view (`installed`), its communicator (`rebuilt`),
    and the first commit (or op) of a step that was not complete before (`resumed`). If no epoch ended, nothing was
    installed, and `resumed` has the first commits after the fault.
    """

    fault: float
    detected: float | None = None
    replaced: float | None = None
    members: tuple[str, ...] = ()
    installed: Mapping[str, float] = field(default_factory=dict)
    rebuilt: Mapping[str, float] = field(default_factory=dict)
    resumed: Mapping[str, float] = field(default_factory=dict)

    @property
    def late(self) -> tuple[str, ...]:
        """The members of the next view that have not worked in it."""
        return tuple(member for member in self.members if member not in self.resumed)

    @property
    def over(self) -> bool:
        """Whether there is a next view, and all of its members have worked in it."""
        return bool(self.members) and not self.late


def recovery_of(log: Iterable[Event], fault: float, lost: Collection[str] = (), until: float = math.inf) -> Recovery:
    """The recovery from a fault, by the events of all processes.

    The next view is the first one without the `lost` members. What is known of the fault, and the end of the epoch,
    come before `until`.
    """
    later = sorted((event for event in log if event.time > fault), key=lambda event: event.time)
    early = [event for event in later if event.time < until]
    detected = next((event.time for event in early if isinstance(event, DETECTED)), None)
    if detected is None:
        return Recovery(fault, resumed=_commits(later, fault))
    replaced = next((event.time for event in later if event.time > detected and _replaces(event, until)), None)
    if not any(isinstance(event, events.EpochRevoked) for event in early):
        return Recovery(fault, detected, replaced, resumed=_commits(later, replaced or fault))
    members: tuple[str, ...] = ()
    installed: dict[str, float] = {}
    rebuilt: dict[str, float] = {}
    resumed: dict[str, float] = {}
    for event in later:
        who = event.process
        if isinstance(event, events.ViewInstalled) and who not in installed and event.time >= detected:
            if not set(lost).intersection(event.members):
                members, installed[who] = members or event.members, event.time
        elif isinstance(event, events.CommunicatorBuilt) and who in installed:
            rebuilt.setdefault(who, event.time)
        elif isinstance(event, events.StepCommitted) and who in installed and event.how != "recovered":
            resumed.setdefault(who, event.time)
        elif isinstance(event, events.EpochReduced) and who in installed:
            resumed.setdefault(who, event.completed)
    return Recovery(fault, detected, replaced, members, installed, rebuilt, resumed)


def _replaces(event: Event, until: float) -> bool:
    """Whether another process now does the work of a lost one. A copy made after `until` may be for the next fault."""
    return isinstance(event, events.RoleReplaced) or (isinstance(event, events.ReplicaMade) and event.time < until)


def _commits(later: Iterable[Event], since: float) -> dict[str, float]:
    """The first commit of each process."""
    found: dict[str, float] = {}
    for event in later:
        if isinstance(event, events.StepCommitted) and event.time >= since:
            found.setdefault(event.process, event.time)
    return found


def wait_for_recovery(
    read: Callable[[], Iterable[Event]], fault: float, lost: Collection[str], *, limit: float, every: float
) -> Recovery:
    """Call `read` for all events so far, `every` so many seconds, until the recovery is over. Raises `NotRecovered`."""
    deadline = time.monotonic() + limit
    while not (found := recovery_of(read(), fault, lost)).over:
        if time.monotonic() >= deadline:
            what = f"members {', '.join(found.late)} did not work again" if found.members else "no next view began"
            raise NotRecovered(f"{what} within {limit:g} s of the loss of {', '.join(sorted(lost))}")
        time.sleep(every)
    return found
