"""Turns the events of a service's replicas into those of the run's processes."""

from __future__ import annotations

from holdfast.rl.run.run_events import CallTakenOver, ProcessLost, ProcessStarted
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.services.service import Service
from holdfast.rl.services.status import ReplicaEvent


class ProcessRecorder:
    """Emits a process's start and loss for each replica of a service."""

    def __init__(self, role: str, telemetry: RunTelemetry) -> None:
        self._role, self._telemetry = role, telemetry
        self._found: dict[str, tuple[str, int]] = {}
        """The host and the number of each process."""
        self._in_slot: dict[int, str] = {}
        self.service: Service | None = None

    def hear(self, event: ReplicaEvent) -> None:
        """Handle an event."""
        at = self._telemetry.at(event.time)
        name, role = event.replica, self._role
        if event.kind == "ready":
            self._started(name, event.slot, at)
        elif event.kind == "lost" and name in self._found:
            how = event.detail.splitlines()[0] if event.detail else "ended"
            host, pid = self._found.pop(name)
            self._telemetry.emit(ProcessLost(time=at, name=name, role=role, host=host, pid=pid, how=how))
        elif event.kind == "took_over":
            self._telemetry.emit(CallTakenOver(time=at, process=name, lost=event.detail, seconds=event.seconds))

    def see_first(self, service: Service) -> None:
        """Record the replicas with which a service began."""
        self.service = service
        for each in service.status().replicas:
            if each.health == "ready":
                self._started(each.name, each.slot, self._telemetry.now())

    def _started(self, name: str, slot: int, at: float) -> None:
        if self.service is None or name in self._found:
            return
        replicas = self.service.status().replicas
        mine = next(((each.host, each.pids[0]) for each in replicas if each.name == name and each.pids), ("", 0))
        host, pid = self._found[name] = mine
        replaces, self._in_slot[slot] = self._in_slot.get(slot, ""), name
        self._telemetry.emit(ProcessStarted(time=at, name=name, role=self._role, host=host, pid=pid, replaces=replaces))
