"""The invariants of steps: what is committed, by whom, and with which state."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class Commits(Checker):
    """A committed step is never lost or done twice."""

    name: ClassVar[str] = "committed steps are kept"
    meaning: ClassVar[str] = (
        "On each process committed steps follow each other without a gap or a repeat, from the first or from the "
        "state taken over (or the checkpoint, where state was lost), and all who finish have committed the same last "
        "step."
    )

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
    """An evicted rank commits no step that the current members do not commit.

    A process that has not heard of its eviction may still leave a barrier that all had entered: then the others commit
    the step as well, by their votes. It must never commit a step that they undo, or never do.
    """

    name: ClassVar[str] = "no evicted rank commits"
    meaning: ClassVar[str] = (
        "From the moment a view without a process is installed by any other, it commits no step but one that the "
        "others "
        "commit too."
    )

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
        elif step > self._committed and self._aborted.get(step, 0) > event.epoch:
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
    """No effect of a revoked epoch: after revoking it a process prepares and commits nothing more in it.

    A decision of the recovery on an open step (`how` is not "normal") is an effect of the next epoch.
    """

    name: ClassVar[str] = "no effect of a revoked epoch"
    meaning: ClassVar[str] = "A process that has revoked an epoch begins, prepares and commits nothing more in it."

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
    """All ranks that complete a step hold equal bits: the logged digests of the state after the step are equal."""

    name: ClassVar[str] = "equal bits"
    meaning: ClassVar[str] = "All who log a digest of their state after a step have the same digest."

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
    """Versions of the weights never go backwards and never vanish."""

    name: ClassVar[str] = "versions are kept"
    meaning: ClassVar[str] = (
        "Published versions grow, a process never fetches an older one than before, only versions that were "
        "published are fetched, and none is lost."
    )

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
