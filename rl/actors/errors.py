"""The errors of actors and engines."""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError

AWAY_SECONDS = 30.0
"""Seconds for which processes are started again that fail by an error that passes, such as a register that is away."""


class NoEngine(HoldfastError):
    """There is no engine to start processes with."""

    def __init__(
        self, why: str = "none is in use here: name one (engine=...), or work in `async with engine:`"
    ) -> None:
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


class HostAway(ActorStartFailed):
    """An actor could not be started on a host that does not answer. `host` is its address."""

    def __init__(self, name: str, host: str, why: str) -> None:
        self.host = host
        super().__init__(name, f"host {host} is away ({why}); start it on another one")


class HostNotServed(HoldfastError):
    """A `monarch_host` cannot listen at its address. `address` is that."""

    def __init__(self, address: str, why: str) -> None:
        self.address = address
        super().__init__(f"host {address} cannot be served: {why}; end what listens there, or choose another port")


class ProcessLost(HoldfastError):
    """A call failed with its process, and not by what it did there."""

    retryable = True


class ActorDied(ProcessLost):
    """The process of an actor has ended. `name` and `pid` say which, `how` it ended."""

    def __init__(self, name: str, pid: int, how: str, method: str) -> None:
        self.name, self.pid, self.how, self.method = name, pid, how, method
        super().__init__(f"actor {name} (pid {pid}) cannot do {method}: {how}; start another, and call that")


class EndpointTimeout(ProcessLost, TimeoutError):
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
