"""Versions of the weights never go backwards and never vanish."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class StoreVersions(Checker):
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
