"""`RunClock`: the events of all drivers of a run on one axis of time, the time without a driver included."""

from __future__ import annotations

import msgspec

from holdfast.rl.run.run_events import Event, ProcessStarted


class RunClock:
    """Places events, in their order. A driver that resumes a run writes on from the last event of the one before.

    From the wall clock at their starts follows how long there was none: later events are moved by that. The processes
    of the second driver are called `trainer-0/2`, and so on, for each driver starts its own.
    """

    def __init__(self) -> None:
        self.downtime = 0.0
        """Seconds without a driver, so far."""
        self.drivers = 0
        self._first: ProcessStarted | None = None
        self._shift = self._last = 0.0

    def place(self, event: Event) -> Event:
        """The event at its time on the axis, with unique names."""
        if isinstance(event, ProcessStarted) and event.role == "driver":
            self._begin(event)
        changed: dict[str, object] = {"time": event.time + self._shift}
        for field in ("name", "process", "replaces"):
            if self.drivers > 1 and (name := getattr(event, field, "")) and "/" not in name:
                changed[field] = f"{name}/{self.drivers}"
        placed: Event = msgspec.structs.replace(event, **changed)
        self._last = max(self._last, placed.time)
        return placed

    def _begin(self, driver: ProcessStarted) -> None:
        self.drivers += 1
        if self._first is None:
            self._first = driver
            return
        if driver.wall and self._first.wall:  # a clock that was set back leaves no time without a driver
            self._shift = max(self._shift, self._first.time + driver.wall - self._first.wall - driver.time)
        self.downtime += max(0.0, driver.time + self._shift - self._last)
