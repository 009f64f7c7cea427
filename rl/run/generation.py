"""The generators and the weight holders of a run: two services, and the switches of what is served."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.rl.actors.service import CALL_SECONDS, ReplicaEvent, Service
from holdfast.rl.config.named_code import extra_python
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators.errors import UpdateFailed
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.generators.transformers_generator import TransformersGenerator
from holdfast.rl.generators.vllm.vllm_generator import VllmGenerator
from holdfast.rl.run.run_events import CopiesRestored, WeightsServed
from holdfast.rl.run.services import RunServices
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.telemetry import WorkLog, WorkReport
from holdfast.store import AsyncWeightStore, WeightStore
from holdfast.store.catalog import transitions

UPDATE_SECONDS = 120.0
"""Seconds in which the generators must have a version."""
PUBLISH_SECONDS = 600.0
"""Seconds in which the trainers must have published a version that they have committed."""
PAUSE_SECONDS = 0.05
"""Seconds between two looks for generators, while there are none."""
SWITCHES = 5
"""How often a version is given to generators that take the place of those which could not take it."""


Route = Callable[[SamplingRequest], Awaitable[Sequence[Completion]]]
_kind_of: Callable[[SamplingRequest], object] = attrgetter(
    *(each for each in SamplingRequest.__struct_fields__ if each not in ("prompts", "seeds"))
)
"""What requests that are joined have in common."""
_Joined = tuple[list[SamplingRequest], "asyncio.Task[Sequence[Completion]]"]


class BatchedRequests:
    """Joins requests for `route`, up to `size` prompts, but for those that are `alone`.

    Requests that come in one turn of the event loop are joined in the order of their coming. So a loop that begins its
    episodes together makes the same batches again after a resume.
    """

    def __init__(self, route: Route, size: int) -> None:
        self._route, self._size = route, size
        self._open: dict[object, _Joined] = {}

    async def __call__(self, request: SamplingRequest) -> Sequence[Completion]:
        """The completions of a request. Raises what `route` raises for the one that it is a part of."""
        if request.alone:
            return await self._route(request)
        kind = _kind_of(request)
        joined, answer = self._open.get(kind) or self._begin(kind)
        if joined and sum(len(each.prompts) for each in joined) + len(request.prompts) > self._size:
            joined, answer = self._begin(kind)
        at = sum(len(each.seeds) for each in joined)
        joined.append(request)
        completions = await asyncio.shield(answer)  # if this request is given up, the others are not
        return completions[at : at + len(request.seeds)]

    def _begin(self, kind: object) -> _Joined:
        joined = list[SamplingRequest]()
        self._open[kind] = joined, asyncio.get_running_loop().create_task(self._send(kind, joined))
        return self._open[kind]

    async def _send(self, kind: object, joined: Sequence[SamplingRequest]) -> Sequence[Completion]:
        """Route what was joined by the next turn of the event loop, in which this task begins."""
        if self._open[kind][0] is joined:
            del self._open[kind]
        whole = msgspec.structs.replace(
            joined[0],
            prompts=tuple(chain.from_iterable([each.prompts for each in joined])),
            seeds=tuple(chain.from_iterable([each.seeds for each in joined])),
        )
        return await self._route(whole)


class Generators:
    """The policy as the loop sees it: `generate(request)`, and `advance(version)`."""

    def __init__(
        self, config: RunConfig, services: RunServices, source: ModelSource, store: str, telemetry: RunTelemetry
    ) -> None:
        self._config, self._services, self._source, self._url = config, services, source, store
        self._telemetry = telemetry
        self._store = AsyncWeightStore(store, hold=False, plane=config.store.plane)
        self._service: Service
        self.generate = BatchedRequests(self._route, config.sampling.batch)

    async def start(self) -> None:
        """Start the generators; they serve nothing before `advance`. Raises `ServiceFailed`, `ExtraNotInstalled`."""
        generator = self._config.generator
        vllm = generator.kind == "vllm"
        self._service = await self._services.start(
            "generator",
            VllmGenerator if vllm else TransformersGenerator,
            *(self._source, self._url, self._config, True),
            num_replicas=generator.replicas,
            python=str(extra_python("vllm", generator.python)) if vllm else None,
            deadline=2 * generator.timeout,
            timeout=max(CALL_SECONDS, 2 * generator.timeout * generator.attempts),
            tries=generator.attempts,
        )

    async def advance(self, version: int) -> int:
        """Wait until a version is published, then have all living replicas serve it, and those that start later.

        Returns the version. That is a later one if this one is not there: its publisher died amid a step that the other
        trainers have committed.
        """
        telemetry = self._telemetry
        began = telemetry.now()
        with telemetry.doing("driver", "driver", "update", version):
            newest = await self._store.wait(version, PUBLISH_SECONDS)
            if newest > version and version not in await self._store.versions():
                version = newest
            names = await self._switch(version)
        self._services.version, now = version, telemetry.now()
        for each in names:
            telemetry.emit(WeightsServed(time=now, version=version, process=each, seconds=now - began))
        return version

    async def _switch(self, version: int) -> tuple[str, ...]:
        """Switch all generators to a version, and replace those that cannot take it; returns the names of the others.

        A generator that comes while a switch is undecided is not a part of it: then the next one names it, too. Raises
        `UpdateFailed` if new generators cannot take the version either.
        """
        service, failures = self._service, 0
        while True:
            service.check()
            try:
                result = await self._store.switch(version, timeout=UPDATE_SECONDS)
            except Mismatch:  # no reader is there
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            readers = [each for each in await self._store.readers() if each.switched]
            names = self._services.processes("generator")
            replicas = {each.id: names[at] for each in readers if (at := (each.peer.host, each.pid)) in names}
            if not result.committed:
                failed = [replicas[each] for each in result.refused or result.missing if each in replicas]
                failures += bool(failed)
                if failures == SWITCHES:
                    raise UpdateFailed(version, result.reason)
                for replica in failed:
                    service.replace(replica, f"it could not be brought to version {version}: {result.reason}")
            elif {each.id for each in readers} <= {*result.ready, *result.missing}:
                return tuple(replicas[each] for each in result.ready if each in replicas)

    async def close(self) -> None:
        """Leave the store. Idempotent."""
        await self._store.close()

    async def _route(self, request: SamplingRequest) -> list[Completion]:
        completions: list[Completion] = await self._service.generate.route(request)
        return completions


ROLE = "holder"
LOOK_SECONDS = 0.1


class WeightHolder:
    """Holds replicas of the newest versions, as many of each among all holders as the store has copies."""

    def __init__(self, config: RunConfig, store: str) -> None:
        self._log = WorkLog()
        replicas, keep = config.store.copies, config.kept_versions
        self._store = WeightStore(store, replicas=replicas, keep=keep, observe=self._hear)

    async def work(self) -> WorkReport:
        """The replicas that the store's threads made since the last call."""
        return self._log.report()

    def close(self) -> None:
        """Leave the store. Idempotent."""
        self._store.close()

    def _hear(self, kind: str, event: Mapping[str, Any]) -> None:
        """Record a replica, in the thread that made it."""
        if kind == "replica_made":
            self._log.add("replicate", event["version"], time.monotonic() - event["seconds"], event["cpu"])


class Holders:
    """The holders of a run. After the loss of one, waits until each version has its copies among the others again.

    It tells the store of hosts that are away: the holders would count beats in the register for eight seconds. A host
    that beats there after all is counted again.
    """

    def __init__(self, config: RunConfig, services: RunServices, store: WeightStore, telemetry: RunTelemetry) -> None:
        self._config, self._services, self._store, self._telemetry = config, services, store, telemetry
        self._away = set[str]()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start the processes that hold the newest versions. Raises `ServiceFailed`."""
        arguments, replicas = (self._config, self._store.url), self._config.store.holders
        await self._services.start(ROLE, WeightHolder, *arguments, num_replicas=replicas, observer=self.hear)

    def hear(self, event: ReplicaEvent) -> None:
        """Look at the copies after the loss of a holder."""
        if event.kind == "lost":
            self._changed.set()

    def host_away(self, host: str) -> None:
        """Count no copy on a host, which is named as `this_host` is there."""
        self._away.add(host)
        self._changed.set()

    async def watch(self) -> None:
        """Watch for ever, and emit `CopiesRestored` after each loss, or several at once."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (versions := await asyncio.to_thread(self._restored)) is None:
                await asyncio.sleep(LOOK_SECONDS)
            self._telemetry.emit(CopiesRestored(time=self._telemetry.now(), versions=versions))

    def _restored(self) -> int | None:
        """The number of visible versions, if all of them have their copies in holders that serve; else None."""
        away = set(self._away)
        try:
            if away:
                with contextlib.closing(self._store.open_catalog()) as catalog:
                    catalog.change(lambda now: transitions.hosts_away(now, away))
            living, versions = self._services.processes(ROLE), self._store.versions()
            holders = [each for version in versions for each in self._store.holders(version)]
            serving = {each.id for each in holders if (each.peer.host, each.pid) in living}
            self._away -= away
            kept = Counter[tuple[int, int]]()
            for version, part, holder in self._store.inspect().replicas():
                kept[version, part] += holder in serving
        except HoldfastError:  # the register is away for a moment, or a version was let go meanwhile
            return None
        return len(versions) if all(count >= self._config.store.copies for count in kept.values()) else None
