"""What is known of a service and its replicas at one moment."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from holdfast.comms.errors import HoldfastError, again

Health = Literal["starting", "ready", "draining", "lost"]


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica: the place `slot` of its service, and the processes in it now.

    `load` counts its calls in flight and open sessions, `restarts` how often the slot was filled again.
    """

    name: str
    slot: int
    host: str
    pids: tuple[int, ...]
    health: Health
    load: int
    restarts: int
    version: int | None = None


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A service; the counts are since its start. `version` is that of the weights, where there are any."""

    name: str
    replicas: tuple[ReplicaStatus, ...]
    queued: int
    calls: int
    retried: int
    overloaded: int
    lost: int
    version: int | None = None


class ReplicaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a replica, at `time` (monotonic seconds).

    "took_over": it answered a call that the replica `detail` had before it was lost; the call took `seconds` in all.
    """

    time: float
    service: str
    replica: str
    slot: int
    kind: Literal["ready", "lost", "start_failed", "stopped", "took_over"]
    detail: str = ""
    seconds: float = 0.0


class ReplicaResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica says to a fanned-out call: `value`, unless there is an `error`."""

    replica: str
    value: Any = None
    error: HoldfastError | None = None

    def get(self) -> Any:
        """The value. Raises the error."""
        if self.error is not None:
            raise again(self.error)
        return self.value
