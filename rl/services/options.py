"""How a service runs its actor."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.rl.actors.engine import Engine
from holdfast.rl.services.status import ReplicaEvent


class PreparedReplica(Protocol):
    """A replica that does not serve yet, as `prepare` gets it."""

    name: str

    async def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method of this replica's actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How a service runs its actor. Raises ValueError for what cannot be."""

    num_replicas: int = 1
    procs: int = 1
    """Processes of a replica. All of them do each call; its result is that of the first."""
    with_gpus: bool = False
    """Whether each process gets a GPU of its own."""
    engine: Engine | None = None
    """None: the engine in use (`async with engine`)."""
    name: str = ""
    python: str | None = None
    """Another interpreter for the replicas."""
    hosts: tuple[str, ...] = ()
    """Addresses of hosts, which replicas are spread over; none: this host."""
    environ: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[PreparedReplica], Awaitable[None]] | None = None
    """Awaited for each new replica before it serves."""
    observer: Callable[[ReplicaEvent], None] | None = None
    concurrency: int = 16
    """Calls that a replica has at a time."""
    queue: int = 256
    """Calls that wait for a replica; one more is refused."""
    timeout: float = 600.0
    """Seconds in which a call must find a replica and be answered, with all its tries."""
    deadline: float | None = None
    """Seconds after which a call hangs, so that its replica is replaced; an endpoint's own deadline goes before."""
    tries: int = 3
    """Replicas that an idempotent call is given to, one after the other."""
    heartbeat: float = 0.25
    """Seconds between looks at the processes. A ping follows when one is stopped, and after a second without any."""
    silence: float = 5.0
    """Seconds without an answer to pings after which a replica is replaced; a stopped one is found at once."""
    start_failures: int = 5
    """Failures to start, one after the other, after which the service is given up."""
    drain: float = 60.0
    """Seconds that a replica may take to end its calls and sessions when the service is scaled down."""

    def __post_init__(self) -> None:
        for name in ("num_replicas", "procs", "concurrency", "queue", "tries", "start_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: give 1 or more")
        for name in ("timeout", "heartbeat", "silence", "drain"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: give seconds, more than 0")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline={self.deadline!r}: give seconds, more than 0, or None")
        if self.with_gpus and self.hosts:
            raise ValueError("with_gpus and hosts: GPUs are given out on this host alone")

    @staticmethod
    def default_name(actor: type[Any]) -> str:
        """The name of a service of this actor, if it is given none."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", actor.__name__).lower()
