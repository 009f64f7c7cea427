"""The invariants of a job, one checker each, over the merged event stream of all its processes.

events = read_events(log_directory, refuse)          # of holdfast.ft.event_lines
for violation in check(events): ...

Checkers keep no clock and do no I/O, so the same ones serve logs of real runs and a simulator, which can read
`violations` after every event.

"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec import UNSET

from holdfast.ft import events
from holdfast.ft.console.units import counted
from holdfast.ft.events import Event


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits in seconds.

    `operation`: how long an op without a timeout of its own may take. `slack`: how much later than its deadline an op
    may end, because of the scheduler. `progress`: how long after a fault the next step must be committed.
    """

    operation: float = 30.0
    slack: float = 1.0
    progress: float = 30.0


class Violation(msgspec.Struct, frozen=True):
    """A broken invariant: which, where, when, and how."""

    invariant: str
    process: str
    time: float
    message: str


class CheckResult(msgspec.Struct, frozen=True):
    """The result of a checker.

    `looked` counts the events that it checked: 0 proves nothing.
    """

    invariant: str
    meaning: str
    looked: int
    violations: tuple[Violation, ...]


class Checker(ABC):
    """One invariant. `name` is a few words, and the first paragraph of the docstring is its `meaning` in reports.

    `optional`: it has no result if it looked at nothing, as where real processes log too little for it.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    optional: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.meaning = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.looked = 0
        self.violations: list[Violation] = []

    @abstractmethod
    def observe(self, event: Event) -> None:
        """Check the next event."""

    def finish(self) -> None:
        """Check at the end of the events: what had to happen and did not is a violation."""
        return

    def violated(self, event: Event, message: str) -> None:
        self.violations.append(Violation(self.name, event.process, event.time, message))

    def finding(self) -> CheckResult:
        return CheckResult(self.name, self.meaning, self.looked, tuple(self.violations))


# Time: every op, attempt, recovery and job ends, and no core breaks ---------------------------------------------------


OPEN = "open"
"""The `error` of an op that has not ended when the run has."""


class Deadlines(Checker):
    """Every op and every attempt ends in time, with a result or an error. A stopped or dead process is excused."""

    name: ClassVar[str] = "ops end by their deadline"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._open: dict[str, events.StepBegun] = {}
        self._now = 0.0
        self._gone: set[str] = set()
        self._stopped: dict[str, float] = {}

    def observe(self, event: Event) -> None:
        self._now = event.time
        match event:
            case events.FaultInjected(what="pause" | "stop", target=str(target)):
                self._stopped[target] = event.time
            case events.FaultInjected(what="kill" | "host-lost", target=str(target)):
                self._gone.add(target)
            case events.ProcessDied():
                self._gone.add(event.process)
            case events.DeathsDetected(members=members):
                self._gone.update(members)
            case events.MemberUnreachable(member=member):
                self._gone.add(member)
            case events.OpEnded():
                self._check_op(event)
            case events.StepBegun():
                self._close(event.process)
                self.looked += 1
                self._open[event.process] = event
            case events.StepCommitted() | events.StepAborted() | events.StepsFinished() | events.SessionFailed():
                self._close(event.process)

    def _check_op(self, event: events.OpEnded) -> None:
        self.looked += 1
        if event.error == OPEN and event.process in self._gone:
            return
        limit = self.bounds.operation if event.timeout is UNSET else event.timeout
        if event.seconds <= limit + self.bounds.slack or self._was_stopped(event.process, event.time - event.seconds):
            return
        taken = f"has not ended after {event.seconds:.3g} s" if event.error == OPEN else f"took {event.seconds:.3g} s"
        self.violated(event, f"{event.op} {taken}, its limit is {limit:.3g} s")

    def finish(self) -> None:
        for process in tuple(self._open):
            if process not in self._gone:
                self._close(process)

    def _close(self, process: str) -> None:
        begun = self._open.pop(process, None)
        if begun is None or self._was_stopped(process, begun.time):
            return
        taken = self._now - begun.time
        if taken > self.bounds.operation + self.bounds.slack:
            self.violated(begun, f"the attempt at step {begun.step} was open for {taken:.3g} s")

    def _was_stopped(self, process: str, since: float) -> bool:
        return self._stopped.get(process, -1.0) >= since


class ProgressResumes(Checker):
    """After the last of any faults a step is committed, or the job ends, within the bound."""

    name: ClassVar[str] = "progress resumes"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._fault: Event | None = None
        self._now = 0.0

    def observe(self, event: Event) -> None:
        self._now = event.time
        if isinstance(event, events.FaultInjected | events.DeathsDetected):
            self.looked += 1
            self._overdue()
            if isinstance(event, events.FaultInjected) or self._fault is None:
                self._fault = event
        elif isinstance(event, events.StepCommitted | events.StepsFinished):
            self._overdue()
            self._fault = None

    def finish(self) -> None:
        self._overdue()

    def _overdue(self) -> None:
        if self._fault is None or self._now - self._fault.time <= self.bounds.progress:
            return
        self.violated(
            self._fault,
            f"no step was committed within {self.bounds.progress:.3g} s of this {self._fault.kind}: "
            f"{self._now - self._fault.time:.3g} s passed",
        )
        self._fault = None


ENDED = events.ProcessDied | events.SessionFailed | events.StepsFinished | events.CoreBroken
Asked = events.JoinRequested | events.SpareWaits | events.ViewInstalled
"""What a process says that has not ended."""


class CompletionChecker(Checker):
    """Within a bound after the last fault all that live have finished or ended with a reason.

    So have those that asked for a place, and members of a job that never began. Checks runs that end with an event
    `horizon`, with `seconds` since the end of the last fault.
    """

    name: ClassVar[str] = "a healed job ends"
    optional: ClassVar[bool] = True

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._open: dict[str, Asked] = {}
        self._members: set[str] = set()
        self._finished = False

    def observe(self, event: Event) -> None:
        if isinstance(event, Asked):
            self._open[event.process] = event
            if isinstance(event, events.ViewInstalled):
                self._members.add(event.process)
        elif isinstance(event, ENDED):
            self._open.pop(event.process, None)
            self._finished |= isinstance(event, events.StepsFinished)
        elif isinstance(event, events.SimulationEnds):
            self.looked += 1
            for process, last in self._open.items():
                if process in self._members or self._finished or not self._members:
                    epoch = "" if isinstance(last, events.JoinRequested) else f" epoch {last.epoch}"
                    self.violated(
                        event,
                        f"{process} has not ended {event.seconds:.3g} s after the last fault was over; the last it "
                        f"said: {last.kind}{epoch} at {last.time:.3g} s",
                    )


class EnoughMembersFinish(Checker):
    """A simulated job with steps finishes, if as many of its processes remain as it needs, one of them with its state.

    Those that died, were evicted, or resigned because they were cut off do not remain; those that gave up otherwise do.
    A job whose first view was never installed had not begun.
    """

    name: ClassVar[str] = "a job with enough members finishes"
    optional: ClassVar[bool] = True

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._knows = self._has_steps = self._finished = False
        self._first: events.ViewInstalled | None = None
        self._known: set[str] = set()
        self._holders: set[str] = set()
        self._gone: set[str] = set()
        self._gave_up: dict[str, events.SessionFailed] = {}

    def observe(self, event: Event) -> None:
        match event:
            case events.SimulationBegun():
                self._knows = True
            case events.ViewInstalled() if self._first is None:
                self._first = event
                self._known.update(event.members)
                self._holders.update(event.members)
            case events.ViewInstalled():
                self._known.update(event.members)
            case events.SpareWaits():
                self._known.add(event.process)
            case events.StateReceived() | events.StepCommitted():
                self._holders.add(event.process)
            case events.StepBegun():
                self._has_steps = True
            case events.SessionFailed():
                self._gave_up.setdefault(event.process, event)
            case events.ProcessDied() if event.process not in self._gave_up:
                self._gone.add(event.process)
            case events.WasEvicted() | events.ResignedItself():
                self._gone.add(event.process)
            case events.StepsFinished() if self._knows:
                self.looked += 1
                self._finished = True

    def finish(self) -> None:
        first, remain = self._first, self._known - self._gone
        if not self._knows or not self._has_steps or self._finished or first is None or not remain & self._holders:
            return
        needed = 1 if first.min_size is UNSET else first.min_size
        if len(remain) >= needed:
            self.looked += 1
            last = max(self._gave_up.values(), key=lambda event: event.time, default=None)
            why = "" if last is None else f"; the last to give up said: {last.error}"
            remained = counted(len(remain), "process", "processes")
            words = f"nobody finished, though {remained} remained of a job of {needed} or more{why}"
            self.violated(first if last is None else last, words)


STATE_APART = ("come apart", "call steps() alike")
"""Parts of a session's errors when ranks do not have the same state."""


class Unbroken(Checker):
    """No process fails by its own membership core, and ranks never come apart in their state."""

    name: ClassVar[str] = "the core goes on"

    def observe(self, event: Event) -> None:
        match event:
            case events.ViewInstalled():
                self.looked += 1
            case events.SessionFailed(error=error) if any(words in error for words in STATE_APART):
                self.violated(event, error)
            case events.CoreBroken(error=error):
                self.violated(event, error)


# Memberships: the members of each epoch, their ranks, and why they left -----------------------------------------------


class OneMembership(Checker):
    """All processes that install an epoch have the same members, in the same rank order, and are one of them."""

    name: ClassVar[str] = "one membership an epoch"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._first: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._equal: dict[int, tuple[str, ...]] = {}
        """The object last found equal to the first: processes share the object of a view from one message."""

    def observe(self, event: Event) -> None:
        if not isinstance(event, events.ViewInstalled):
            return
        self.looked += 1
        epoch, members = event.epoch, event.members
        first, agreed = self._first.setdefault(epoch, (event.process, members))
        if members is not agreed and members is not self._equal.get(epoch):
            if members == agreed:
                self._equal[epoch] = members
            else:
                self.violated(event, f"epoch {epoch} has members {members} here, and {agreed} on {first}")
        rank = event.rank
        if rank is None or not (0 <= rank < len(members) and members[rank] == event.process):
            self.violated(event, f"is rank {rank} of epoch {epoch}, whose members are {members[:8]}")


class EpochsForward(Checker):
    """A process installs ever newer epochs, and begins no step in one that it has left."""

    name: ClassVar[str] = "epochs never go back"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._installed: dict[str, int] = {}

    def observe(self, event: Event) -> None:
        if not isinstance(event, events.ViewInstalled | events.StepBegun | events.StepPrepared):
            return
        self.looked += 1
        epoch, newest = event.epoch, self._installed.get(event.process, 0)
        if isinstance(event, events.ViewInstalled):
            if epoch <= newest:
                self.violated(event, f"installs epoch {epoch} after {newest}")
            self._installed[event.process] = max(epoch, newest)
        elif epoch != newest:
            self.violated(event, f"{event.kind} of step {event.step} in epoch {epoch}, while in {newest}")


class RankOrder(Checker):
    """Survivors keep their order from one epoch to the next, and no member has two ranks. Newcomers take the ranks of
    members that left, or come last. There are never fewer members than the job can run with.
    """

    name: ClassVar[str] = "ranks keep their order"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._newest: tuple[int, tuple[str, ...]] = (0, ())

    def observe(self, event: Event) -> None:
        if not isinstance(event, events.ViewInstalled) or event.epoch <= self._newest[0]:
            return
        self.looked += 1
        (before, old), (epoch, new) = self._newest, (event.epoch, event.members)
        self._newest = (epoch, new)
        known = set(new)
        if len(known) != len(new):
            self.violated(event, f"somebody has two ranks of epoch {epoch}: {_few(new)}")
        if event.min_size is not UNSET and len(new) < event.min_size:
            self.violated(event, f"epoch {epoch} has {counted(len(new), 'member')}, the job needs {event.min_size}")
        if before == 0 or epoch != before + 1:
            return
        were = set(old)
        if [who for who in old if who in known] != [who for who in new if who in were]:
            self.violated(event, f"survivors changed their order: {_few(old)} became {_few(new)}")
        elif list(new) != _lawful(old, [who for who in new if who not in were], known):
            self.violated(event, f"newcomers have not taken the ranks that were left: {_few(old)} became {_few(new)}")


def _lawful(old: tuple[str, ...], newcomers: list[str], known: set[str]) -> list[str]:
    """The expected members: newcomers take the first ranks that became free, further ones come last."""
    lawful = []
    for who in old:
        if who in known:
            lawful.append(who)
        elif newcomers:
            lawful.append(newcomers.pop(0))
    return lawful + newcomers


def _few(members: tuple[str, ...]) -> str:
    return ", ".join(members[:8]) + (f" and {len(members) - 8} more" if len(members) > 8 else "")


WINDOW = 1.5
"""Seconds for which a retracted suspicion may still count: the retraction may be cut off."""
LEFT = (
    events.ProcessDied
    | events.SessionFailed
    | events.StepsFinished
    | events.WasEvicted
    | events.CoreBroken
    | events.ResignedItself
)


class EvictionsJustified(Checker):
    """A process that an epoch leaves out had ended, had been stopped, or could not work with others for long. Else at
    least half of its observers had not heard it a moment before.

    Checks only simulated runs: their logs have the end and the pauses of every process. Such a log begins with an event
    `simulated`, and has `died`, `stopped`, and `suspected` with `of`, the number of observers.
    """

    name: ClassVar[str] = "nobody healthy is evicted"
    optional: ClassVar[bool] = True

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._knows = False
        self._epoch = 0
        self._members: tuple[str, ...] = ()
        self._gone: set[str] = set()
        self._stopped: dict[str, float] = {}
        self._doubts: dict[str, dict[str, tuple[float, float]]] = {}
        self._observers: dict[str, int] = {}
        self._failed: set[str] = set()

    def observe(self, event: Event) -> None:
        match event:
            case events.SimulationBegun():
                self._knows = True
            case events.ViewInstalled() if self._knows and event.epoch > self._epoch:
                self._installed(event)
            case events.ProcessStopped():
                self._stopped[event.process] = event.time + event.seconds
            case events.MemberSuspected(member=member, of=int(of)):
                self._doubts.setdefault(member, {})[event.process] = (event.time, float("inf"))
                self._observers[member] = of
            case events.SuspicionCleared():
                doubts = self._doubts.get(event.member, {})
                if event.process in doubts:
                    doubts[event.process] = (doubts[event.process][0], event.time)
            case events.MemberUnreachable():
                self._failed.add(event.member)
            case _ if isinstance(event, LEFT):
                self._gone.add(event.process)

    def _installed(self, event: events.ViewInstalled) -> None:
        epoch, members = event.epoch, event.members
        known = set(members)
        left = [who for who in self._members if who not in known] if epoch == self._epoch + 1 else []
        self._epoch, self._members = epoch, members
        for who in left:
            self.looked += 1
            if not self._justified(who, event.time):
                self.violated(event, f"{who} is not in epoch {epoch} any more, though it lives and can be heard")

    def _justified(self, who: str, now: float) -> bool:
        if who in self._gone or who in self._failed or self._stopped.get(who, -1e9) >= now - WINDOW:
            return True
        doubters = sum(until >= now - WINDOW for _, until in self._doubts.get(who, {}).values())
        return 2 * doubters >= max(1, self._observers.get(who, 0))


# Steps: what is committed, by which members, and with which state -----------------------------------------------------


class Commits(Checker):
    """On each process committed steps follow each other without a gap or a repeat. They begin with the first one, with
    the state taken over, or, where state was lost, with the checkpoint. All that finish have the same last step.
    """

    name: ClassVar[str] = "committed steps are kept"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._newest: dict[str, int] = {}
        self._finished: dict[str, events.StepsFinished] = {}
        self._most: events.StepCommitted | None = None
        self._first: int | None = None
        self._went_back: set[int] = set()

    def observe(self, event: Event) -> None:
        match event:
            case events.StateReceived():
                self._synced(event)
            case events.StateRestored(source="checkpoint"):
                self._newest[event.process] = event.step
                self._went_back.add(event.step)
            case events.StepCommitted():
                self._committed(event)
            case events.StepsFinished() if event.process in self._newest:
                self._finished[event.process] = event

    def finish(self) -> None:
        if self._most is None:
            return
        for process, event in self._finished.items():
            if self._newest[process] != self._most.step:
                self.violated(
                    event,
                    f"finished after step {self._newest[process]}, but {self._most.process} committed step "
                    f"{self._most.step}",
                )

    def _synced(self, event: events.StateReceived) -> None:
        step, newest = event.step, self._newest.get(event.process)
        self.looked += 1
        if newest is not None and step < newest and step not in self._went_back:
            self.violated(event, f"took over the state after step {step}, having committed step {newest}")
        self._newest[event.process] = step

    def _committed(self, event: events.StepCommitted) -> None:
        step = event.step
        self.looked += 1
        if self._first is None:
            self._first = step
        newest = self._newest.get(event.process, self._first - 1)
        if step <= newest:
            self.violated(event, f"committed step {step} again: its newest was {newest}")
        elif step != newest + 1:
            self.violated(event, f"committed step {step} after step {newest}: those between are lost")
        self._newest[event.process] = max(step, newest)
        if self._most is None or step > self._most.step:
            self._most = event


class NoEvictedCommits(Checker):
    """Once a view without a process is installed anywhere, that process commits only steps that the others commit too.

    A process that has not heard of its eviction may still leave a barrier that all had entered: then the others commit
    the step as well, by their votes. It must never commit a step that they undo, or never do.
    """

    name: ClassVar[str] = "no evicted rank commits"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._epoch = 0
        self._members: frozenset[str] = frozenset()
        self._late: dict[int, events.StepCommitted] = {}
        self._aborted: dict[int, int] = {}
        self._committed = -1

    def observe(self, event: Event) -> None:
        match event:
            case events.ViewInstalled() if event.epoch > self._epoch:
                self._epoch, self._members = event.epoch, frozenset(event.members)
            case events.StepAborted():
                step = event.step
                self._aborted[step] = max(event.epoch, self._aborted.get(step, 0))
                if step in self._late:
                    self._undone(self._late.pop(step))
            case events.StepCommitted() if self._epoch:
                self._commits(event)

    def finish(self) -> None:
        for step, event in self._late.items():
            if step > self._committed:
                self._undone(event)

    def _commits(self, event: events.StepCommitted) -> None:
        self.looked += 1
        step = event.step
        if event.process in self._members:
            self._committed = max(self._committed, step)
        elif self._aborted.get(step, 0) >= event.epoch:  # also if they have done it again since
            self._undone(event)
        elif step > self._committed:
            self._late[step] = event

    def _undone(self, event: events.StepCommitted) -> None:
        self.violated(
            event,
            f"committed step {event.step} of epoch {event.epoch}, after epoch "
            f"{self._epoch} had begun without it, and the others did not commit it",
        )


BY_ALL = "normal"
"""`how` of a step that was committed in the epoch of its attempt."""


class RevokedEffects(Checker):
    """A process that has revoked an epoch begins, prepares and commits nothing more in it.

    A decision of the recovery on an open step (`how` is not "normal") is an effect of the next epoch.
    """

    name: ClassVar[str] = "no effect of a revoked epoch"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._revoked: dict[str, int] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, events.EpochRevoked):
            newest = self._revoked.get(event.process, 0)
            self._revoked[event.process] = max(newest, event.epoch)
            return
        if not isinstance(event, events.StepBegun | events.StepPrepared | events.StepCommitted):
            return
        self.looked += 1
        epoch, revoked = event.epoch, self._revoked.get(event.process, 0)
        if epoch > revoked or (isinstance(event, events.StepCommitted) and event.how != BY_ALL):
            return
        self.violated(event, f"{event.kind} of step {event.step} in epoch {epoch}, revoked up to {revoked}")


class EqualBits(Checker):
    """All processes that log a digest of their state after a step have the same digest."""

    name: ClassVar[str] = "equal bits"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._digests: dict[int, tuple[str, str]] = {}

    def observe(self, event: Event) -> None:
        match event:
            case (
                events.StateDigested(step=step, digest=str(digest))
                | events.StepCommitted(step=step, digest=str(digest))
                | events.StateReceived(step=step, digest=str(digest))
            ):
                self._compare(event, step, digest)

    def _compare(self, event: Event, step: int, digest: str) -> None:
        self.looked += 1
        first, agreed = self._digests.setdefault(step, (event.process, digest))
        if digest != agreed:
            self.violated(event, f"step {step} has digest {digest} here, and {agreed} on {first}")


class StoreVersions(Checker):
    """Published versions grow, and none is lost. A process fetches published versions only, and never an older one than
    before.
    """

    name: ClassVar[str] = "versions are kept"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._published: set[int] = set()
        self._retired: dict[int, float] = {}
        self._fetched: dict[str, events.VersionFetched] = {}

    def observe(self, event: Event) -> None:
        match event:
            case events.VersionPublished(version=version):
                newest = max(self._published, default=-1)
                if version < newest and version not in self._published:
                    self.violated(event, f"published version {version} after {newest}")
                self._published.add(version)
                self._retired.pop(version, None)
            case events.VersionFetched():
                self._check_fetched(event)
            case events.VersionRetired(version=version):
                self._retired[version] = event.time
            case events.VersionLost(version=version):
                self.violated(event, f"version {version} is lost: no holder has it any more")
            case _:
                return
        self.looked += 1

    def _check_fetched(self, event: events.VersionFetched) -> None:
        version, last = event.version, self._fetched.get(event.process)
        before, began = (-1, 0.0) if last is None else (last.version, last.time)
        if version not in self._published:
            self.violated(event, f"fetched version {version}, which nobody had published")
        if self._retired.get(version, event.time) < began:
            self.violated(event, f"began to fetch version {version} after it was retired")
        if version < before:
            self.violated(event, f"fetched version {version} after {before}")
        self._fetched[event.process] = event


# All of them ----------------------------------------------------------------------------------------------------------


CHECKERS: tuple[type[Checker], ...] = (
    OneMembership,
    EpochsForward,
    RevokedEffects,
    Deadlines,
    EqualBits,
    NoEvictedCommits,
    Commits,
    ProgressResumes,
    StoreVersions,
    RankOrder,
    EvictionsJustified,
    CompletionChecker,
    EnoughMembersFinish,
    Unbroken,
)

__all__ = [
    "CHECKERS",
    "Bounds",
    "CheckResult",
    "Checker",
    "Event",
    "Violation",
    "check",
    "examine",
]


def examine(
    events: Iterable[Event], bounds: Bounds | None = None, kinds: Sequence[type[Checker]] = CHECKERS
) -> list[CheckResult]:
    """Run checkers over `events`, which are in the order of time. Optional ones without a result are left out."""
    checkers = [kind(bounds or Bounds()) for kind in kinds]
    for event in events:
        for checker in checkers:
            checker.observe(event)
    for checker in checkers:
        checker.finish()
    return [each.finding() for each in checkers if each.looked or each.violations or not each.optional]


def check(events: Iterable[Event], bounds: Bounds | None = None) -> list[Violation]:
    """Every violation in `events`, in the order of time."""
    found = [violation for finding in examine(events, bounds) for violation in finding.violations]
    return sorted(found, key=lambda violation: violation.time)
