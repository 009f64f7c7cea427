"""The errors of actors, engines and services. The class says whether a call may be tried again: `retryable`."""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError
from holdfast.ft.console.units import counted


class NoEngine(HoldfastError):
    """There is no engine to start processes with."""

    def __init__(self, why: str) -> None:
        super().__init__(f"there is no engine to start processes with: {why}")


class CausedError(HoldfastError):
    """An actor failed by an error of its own, which is the `__cause__`."""

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        """Whether its cause is."""
        return isinstance(self.__cause__, HoldfastError) and self.__cause__.retryable


class ActorStartFailed(CausedError):
    """An actor could not be started: its process ended, or its constructor raised. `name` says which."""

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why
        super().__init__(f"actor {name} did not start: {why}")


class ActorHostAway(ActorStartFailed):
    """An actor could not be started on a host that does not answer. `host` is its address."""

    def __init__(self, name: str, host: str, why: str) -> None:
        self.host = host
        super().__init__(name, f"host {host} is away ({why}); start it on another one")


class ActorProcessLost(HoldfastError):
    """A call failed with its process, and not by what it did there."""

    retryable = True


class ActorDied(ActorProcessLost):
    """The process of an actor has ended. `name` and `pid` say which, `how` it ended."""

    def __init__(self, name: str, pid: int, how: str, method: str) -> None:
        self.name, self.pid, self.how, self.method = name, pid, how, method
        super().__init__(f"actor {name} (pid {pid}) cannot do {method}: {how}; start another, and call that")


class EndpointTimeout(ActorProcessLost, TimeoutError):
    """A call was not answered in time. The method may still run in the actor."""

    def __init__(self, name: str, pid: int, method: str, seconds: float) -> None:
        self.name, self.pid, self.method, self.seconds = name, pid, method, seconds
        super().__init__(
            f"actor {name} (pid {pid}) did not answer {method} within {seconds:.3g} s; the method may still run there: "
            "give it longer, or end the process"
        )


class NoSuchEndpoint(HoldfastError, AttributeError):
    """The actor has no public method of this name."""

    def __init__(self, kind: str, method: str, known: tuple[str, ...]) -> None:
        self.method, self.known = method, known
        super().__init__(f"{kind} has no endpoint {method!r}; it has: {', '.join(known) or 'none'}")


class EndpointFailed(CausedError):
    """A method of an actor raised. `__cause__` is the original error, `trace` its traceback in the actor."""

    def __init__(self, name: str, method: str, summary: str, trace: str) -> None:
        self.name, self.method, self.summary, self.trace = name, method, summary, trace
        super().__init__(f"actor {name} failed in {method}: {summary}\n\n{trace}")


class ReplicaLost(HoldfastError):
    """The replica that had a call was lost, and the call may not, or not again, be tried elsewhere.

    `why` says how it was lost, `tries` how many replicas had the call.
    """

    def __init__(self, replica: str, method: str, why: str, tries: int, hint: str) -> None:
        self.replica, self.method, self.why, self.tries = replica, method, why, tries
        super().__init__(f"{method}: replica {replica} was lost after {counted(tries, 'try', 'tries')}: {why}; {hint}")


class Overloaded(HoldfastError):
    """The queue of a service is full: nothing was done."""

    def __init__(self, service: str, queued: int) -> None:
        self.service, self.queued = service, queued
        super().__init__(
            f"service {service} is overloaded: {counted(queued, 'call')} wait already; call more slowly, scale it up, "
            "or allow a longer queue"
        )


class NoReplica(HoldfastError, TimeoutError):
    """No replica could take a call in time: nothing was done."""

    def __init__(self, service: str, seconds: float, states: str) -> None:
        self.service, self.seconds = service, seconds
        super().__init__(f"no replica of service {service} was free within {seconds:.3g} s ({states})")


class ServiceFailed(HoldfastError):
    """Replicas of a service failed to start again and again, so it was given up."""

    def __init__(self, service: str, failures: int, last: str) -> None:
        self.service, self.failures, self.last = service, failures, last
        super().__init__(
            f"service {service} is given up: a replica failed to start {counted(failures, 'time')} in a row, at last: "
            f"{last}"
        )


class ServiceClosed(HoldfastError):
    """The service was closed."""

    def __init__(self, service: str) -> None:
        self.service = service
        super().__init__(f"service {service} is closed: start another")
