"""A service: replicas of an actor behind `service.method.route(...)`, `.fanout(...)` and `service.session()`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.rl.actors.engine import Endpoint, current_engine, endpoint_of
from holdfast.rl.actors.errors import EndpointTimeout, ProcessLost
from holdfast.rl.services.errors import NoReplica, QuorumMissed, ReplicaLost
from holdfast.rl.services.options import ServiceOptions
from holdfast.rl.services.replica import ServiceReplica, as_error
from holdfast.rl.services.replica_set import ReplicaSet
from holdfast.rl.services.routing import RouteChoice
from holdfast.rl.services.status import ReplicaResult, ServiceStatus

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two tries of a call that every replica has failed."""


@dataclass(slots=True)
class _Counts:
    calls: int = 0
    retried: int = 0


@dataclass(frozen=True, slots=True)
class ServiceEndpoint:
    """One method of all replicas; `options` gives a copy that is called otherwise."""

    endpoint: Endpoint
    choice: RouteChoice
    timeout: float
    deadline: float | None
    _replicas: ReplicaSet
    _counts: _Counts

    def options(
        self,
        *,
        policy: str | None = None,
        key: Hashable = None,
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> ServiceEndpoint:
        """Choose by "least_loaded" or "round_robin", or with a `key` always the same replica; bound the time."""
        if policy not in (None, "least_loaded", "round_robin"):
            raise ValueError(f"policy={policy!r}: give 'least_loaded' or 'round_robin', or a key")
        choice = RouteChoice(policy=policy or self.choice.policy, key=self.choice.key if key is None else key)  # type: ignore[arg-type]
        return replace(self, choice=choice, timeout=timeout or self.timeout, deadline=deadline or self.deadline)

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Call one replica.

        If its replica is lost, an idempotent call goes to others, and so it does after an error that is `retryable`; a
        call that passed its `deadline` costs the replica. Raises `ReplicaLost`, `Overloaded`, `NoReplica`,
        `ServiceFailed`, and `EndpointFailed` if the method raised.
        """
        self._counts.calls += 1
        replica: ServiceReplica | None = None
        began, lost = time.monotonic(), ""
        bound = asyncio.timeout(self.timeout)
        try:
            async with bound:
                tries, choice = 0, self.choice
                while True:
                    replica = await self._replicas.acquire(choice)
                    try:
                        if replica.health == "lost":  # since it was chosen: it never had the call
                            continue
                        tries += 1
                        answer = await self._ask(replica, args, kwargs)
                        if lost:
                            self._replicas.took_over(replica, lost, time.monotonic() - began)
                        return answer
                    except ProcessLost as error:
                        self._may_try_again(replica, tries, error)
                        lost = lost or replica.name
                        self._counts.retried += 1
                    except HoldfastError as error:
                        if not error.retryable or not self.endpoint.idempotent or tries >= self._most_tries:
                            raise
                        self._counts.retried += 1
                    finally:
                        self._replicas.release(replica)
                    if replica.name in choice.avoid:  # there is no other one
                        await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**tries))
                    choice = msgspec.structs.replace(choice, avoid=choice.avoid | {replica.name})
        except TimeoutError:
            if not bound.expired():
                raise
            states = ", ".join(f"{each.name}: {each.health}" for each in self._replicas.replicas)
            raise NoReplica(self._replicas.name, self.timeout, states) from None

    @property
    def _most_tries(self) -> int:
        return self._replicas.options.tries

    async def fanout(self, *args: Any, quorum: int | None = None, **kwargs: Any) -> tuple[ReplicaResult, ...]:
        """Call all replicas; a result or an error for each. Raises `QuorumMissed` if fewer than `quorum` did it."""
        self._replicas.check()
        self._counts.calls += 1
        found = tuple(
            await asyncio.gather(*[self._ask_for_result(each, args, kwargs) for each in self._replicas.replicas])
        )
        done = sum(each.error is None for each in found)
        if quorum is not None and done < quorum:
            errors = [(each.replica, str(each.error)) for each in found if each.error is not None]
            raise QuorumMissed(self.endpoint.name, quorum, done, errors)
        return found

    async def _ask(self, replica: ServiceReplica, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return await replica.call(self.endpoint.name, *args, timeout=self.deadline, **kwargs)
        except EndpointTimeout:
            replica.lose(f"{self.endpoint.name} hangs: it was not answered within {self.deadline:.3g} s")
            raise

    async def _ask_for_result(
        self, replica: ServiceReplica, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ReplicaResult:
        name = self.endpoint.name
        if replica.health != "ready":
            why = f"it is {replica.health}" + (f": {replica.why}" if replica.why else "")
            error = ReplicaLost(replica.name, name, why, 0, "it was not called")
            return ReplicaResult(replica=replica.name, error=error)
        replica.outstanding += 1
        try:
            return ReplicaResult(replica=replica.name, value=await self._ask(replica, args, kwargs))
        except ProcessLost:
            hint = "it is being replaced"
            return ReplicaResult(replica=replica.name, error=ReplicaLost(replica.name, name, replica.why, 1, hint))
        except Exception as error:
            return ReplicaResult(replica=replica.name, error=as_error(error))
        finally:
            self._replicas.release(replica)

    def _may_try_again(self, replica: ServiceReplica, tries: int, error: Exception) -> None:
        name, most = self.endpoint.name, self._most_tries
        if not self.endpoint.idempotent:
            hint = "it may be half done, and is not declared idempotent, so it is not tried elsewhere"
            raise ReplicaLost(replica.name, name, replica.why, tries, hint) from error
        if tries >= most:
            raise ReplicaLost(replica.name, name, replica.why, tries, "the call itself may end them") from error


class ReplicaSession:
    """One replica for several calls: `await one.generate(x)`. Raises `ReplicaLost` once that replica is lost."""

    def __init__(self, replica: ServiceReplica, service: Service) -> None:
        self._replica, self._service = replica, service

    @property
    def name(self) -> str:
        """The replica."""
        return self._replica.name

    async def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method of this replica's actor; after `timeout` seconds, or its deadline, it hangs."""
        endpoint: ServiceEndpoint = getattr(self._service, method)
        seconds = timeout or endpoint.deadline
        try:
            return await self._replica.call(method, *args, timeout=seconds, **kwargs)
        except ProcessLost as error:
            if isinstance(error, EndpointTimeout):
                self._replica.lose(f"{method} hangs: it was not answered within {seconds:.3g} s")
            hint = "what the session had there is gone: begin another session"
            raise ReplicaLost(self.name, method, self._replica.why, 1, hint) from error

    def __getattr__(self, method: str) -> Any:
        endpoint_of(self._service.actor, method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self.call(method, *args, **kwargs)

        return call


class Service:
    """Replicas of an actor, called as one. A context manager that closes it."""

    def __init__(self, actor: type[Any], replicas: ReplicaSet) -> None:
        self.actor = actor
        self._replicas = replicas
        self._counts = _Counts()

    @classmethod
    async def start(
        cls, actor: type[Any], options: ServiceOptions, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Service:
        """Start all replicas. Raises `ServiceFailed`, `NotEnoughGpus`, `NoEngine`, and leaves no process."""
        engine = options.engine or current_engine()
        replicas = ReplicaSet(engine, options.name or options.default_name(actor), actor, options, args, kwargs)
        try:
            await replicas.scale(options.num_replicas)
        except BaseException:
            await asyncio.shield(replicas.close())
            raise
        return cls(actor, replicas)

    def __getattr__(self, method: str) -> ServiceEndpoint:
        found = endpoint_of(self.actor, method)
        options = self._replicas.options
        return ServiceEndpoint(
            found, RouteChoice(), options.timeout, found.deadline or options.deadline, self._replicas, self._counts
        )

    @contextlib.asynccontextmanager
    async def session(self, key: Hashable = None) -> AsyncIterator[ReplicaSession]:
        """Work with one replica, the least loaded or that of `key`."""
        async with asyncio.timeout(self._replicas.options.timeout):
            replica = await self._replicas.acquire(RouteChoice(key=key))
        replica.sessions += 1
        self._replicas.release(replica)
        try:
            yield ReplicaSession(replica, self)
        finally:
            replica.sessions -= 1
            self._replicas.settle()

    async def scale(self, count: int) -> None:
        """Change the number of replicas; those that go end their calls and sessions first. Raises `ServiceFailed`."""
        if count < 1:
            raise ValueError(f"scale({count}): a service has 1 replica or more; close it instead")
        await self._replicas.scale(count)

    def check(self) -> None:
        """Raise `ServiceFailed` or `ServiceClosed` if the service is over."""
        self._replicas.check()

    def replace(self, replica: str, why: str) -> None:
        """Kill a replica, by its name, and start another one in its place. Does nothing to one that is gone."""
        for each in self._replicas.replicas:
            if each.name == replica:
                each.lose(why)

    def status(self) -> ServiceStatus:
        """The service and its replicas now. May be called from any thread."""
        replicas = self._replicas
        slots = sorted(replicas.slots.copy().items())
        return ServiceStatus(
            name=replicas.name,
            replicas=tuple(slot.replica.status(max(0, slot.fillings - 1)) for _, slot in slots),
            queued=replicas.queued,
            calls=self._counts.calls,
            retried=self._counts.retried,
            overloaded=replicas.overloaded,
            lost=replicas.lost,
        )

    async def close(self) -> None:
        """End all replicas. Idempotent."""
        await self._replicas.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
