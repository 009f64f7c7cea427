"""The errors of services."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.comms.errors import HoldfastError
from holdfast.ft.console.units import counted


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


class QuorumMissed(HoldfastError):
    """Too few replicas did a fanned-out call. `errors` has what the others say, by replica."""

    def __init__(self, method: str, quorum: int, done: int, errors: Sequence[tuple[str, str]]) -> None:
        self.method, self.quorum, self.done, self.errors = method, quorum, done, tuple(errors)
        super().__init__(
            f"{method} was done by {counted(done, 'replica')}, and {quorum} are needed: "
            + "; ".join(f"{replica}: {error}" for replica, error in self.errors)
        )


class NotEnoughGpus(HoldfastError):
    """More GPUs are asked for than are free on this host."""

    def __init__(self, need: int, free: int) -> None:
        self.need, self.free = need, free
        super().__init__(f"{counted(need, 'GPU')} are needed and {free} are free: use fewer replicas or procs")
