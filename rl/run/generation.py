"""The generators and the weight holders of a run: two services, and the switches of what is served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from secrets import token_hex

import msgspec

from holdfast.comms.errors import Mismatch
from holdfast.ft import faultpoints
from holdfast.rl.actors.engine import Engine, endpoint
from holdfast.rl.actors.service import Service, ServiceStatus, served
from holdfast.rl.config.named_code import extra_python
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators.errors import UpdateFailed
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.generators.transformers_generator import TransformersGenerator
from holdfast.rl.generators.vllm.vllm_generator import VllmGenerator
from holdfast.rl.run.hosts import service_options
from holdfast.rl.run.run_events import WeightsServed
from holdfast.rl.run.telemetry import ProcessRecorder, RunTelemetry, answers
from holdfast.rl.run.weight_holder import WeightHolder
from holdfast.rl.telemetry import WorkReport
from holdfast.store import AsyncWeightStore, Reader

UPDATE_SECONDS = 120.0
"""Seconds in which the generators must have a version."""
PUBLISH_SECONDS = 600.0
"""Seconds in which the trainers must have published a version that they have committed."""
PAUSE_SECONDS = 0.05
"""Seconds between two looks for generators, while there are none."""
SWITCHES = 5
"""How often a version is given to generators that take the place of those which could not take it."""


Route = Callable[[SamplingRequest], Awaitable[Sequence[Completion]]]
_Kind = tuple[object, ...]
_kind_of: Callable[[SamplingRequest], _Kind] = attrgetter(
    *(each for each in SamplingRequest.__struct_fields__ if each not in ("prompts", "seeds"))
)
"""What requests that are joined have in common."""


@dataclass(slots=True)
class _Joined:
    """Requests that differ in their prompts and seeds alone, and the futures of their completions."""

    requests: list[SamplingRequest] = field(default_factory=list)
    replies: list[asyncio.Future[Sequence[Completion]]] = field(default_factory=list)
    prompts: int = 0

    def whole(self) -> SamplingRequest:
        return msgspec.structs.replace(
            self.requests[0],
            prompts=tuple(chain.from_iterable([each.prompts for each in self.requests])),
            seeds=tuple(chain.from_iterable([each.seeds for each in self.requests])),
        )


class BatchedRequests:
    """Joins requests for `route`, up to `size` prompts, but those that are to be `alone`.

    Requests that come in one turn of the event loop are joined in the order of their coming. So a loop that begins its
    episodes together makes the same batches again after a resume.
    """

    def __init__(
        self, route: Route, size: int, alone: Callable[[SamplingRequest], bool] = lambda request: False
    ) -> None:
        self._route, self._size, self._alone = route, size, alone
        self._open: dict[_Kind, _Joined] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, request: SamplingRequest) -> Sequence[Completion]:
        """The completions of a request. Raises what `route` raises for the one that it is a part of."""
        if self._alone(request):
            return await self._route(request)
        loop = asyncio.get_running_loop()
        if not self._open:
            loop.call_soon(self._send_all)
        kind = _kind_of(request)
        joined = self._open.setdefault(kind, _Joined())
        if joined.requests and joined.prompts + len(request.prompts) > self._size:
            self._send(joined)
            joined = self._open[kind] = _Joined()
        reply: asyncio.Future[Sequence[Completion]] = loop.create_future()
        joined.prompts += len(request.prompts)
        joined.requests.append(request)
        joined.replies.append(reply)
        return await reply

    def _send_all(self) -> None:
        opened, self._open = list(self._open.values()), {}
        for joined in opened:
            self._send(joined)

    def _send(self, joined: _Joined) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(joined))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, joined: _Joined) -> None:
        try:
            completions = await self._route(joined.whole())
        except BaseException as error:
            for reply in joined.replies:
                if not reply.done():
                    reply.set_exception(error) if isinstance(error, Exception) else reply.cancel()
            if not isinstance(error, Exception):
                raise
            return
        at = 0
        for request, reply in zip(joined.requests, joined.replies, strict=True):
            if not reply.done():
                reply.set_result(completions[at : at + len(request.seeds)])
            at += len(request.seeds)


class ServedGenerator(TransformersGenerator):
    """A generator with calls that may be repeated elsewhere: request and weights determine the completions."""

    def __init__(self, source: ModelSource, store: str, config: RunConfig) -> None:
        faultpoints.arm_from_environment()
        super().__init__(source, store, config, between=self._between, reader=new_reader())

    @endpoint(idempotent=True)
    async def generate(self, request: SamplingRequest) -> list[Completion]:
        """See `TransformersGenerator.generate`."""
        return await super().generate(request)

    def _between(self) -> None:
        faultpoints.reach("generate.between_tokens", -1 if self.version is None else self.version, -1, 0)


class ServedVllmGenerator(VllmGenerator):
    """A vLLM generator with calls that may be repeated elsewhere: completions are drawn anew there."""

    def __init__(self, source: ModelSource, store: str, config: RunConfig) -> None:
        super().__init__(source, store, config, reader=new_reader())

    @endpoint(idempotent=True)
    async def generate(self, request: SamplingRequest) -> list[Completion]:
        """See `VllmGenerator.generate`."""
        return await super().generate(request)


def new_reader() -> str:
    """A name for a generator among the readers of the store."""
    return f"generator-{token_hex(4)}"


class Generators:
    """The policy as the loop sees it: `generate(request)`, and `advance(version)`."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        source: ModelSource,
        store: str,
        environ: Mapping[str, str],
        telemetry: RunTelemetry,
    ) -> None:
        self._config, self._source, self._url, self._telemetry = config, source, store, telemetry
        self._engine = engine
        self._version: int | None = None
        self._store = AsyncWeightStore(store, hold=False, plane=config.store.plane)
        self._common = service_options(config, engine, environ)
        self._services: dict[str, Service] = {}
        # A turn of a group is a request of its own: what else is asked at that time must not change its bits.
        self.generate = BatchedRequests(self._route, config.sampling.batch, alone=lambda request: request.samples == 1)

    async def start_holders(self) -> None:
        """Start the processes that hold the newest versions. Raises `ServiceFailed`."""
        spec = served(
            WeightHolder,
            name="holder",
            num_replicas=self._config.store.holders,
            observer=ProcessRecorder("holder", self._telemetry).hear,
            **self._common,
        )
        self._services["holder"] = await spec.as_service(self._config, self._url)

    async def start(self) -> None:
        """Start the generators; they serve nothing before `advance`. Raises `ServiceFailed`, `ExtraNotInstalled`."""
        generator = self._config.generator
        vllm = generator.kind == "vllm"
        spec = served(
            ServedVllmGenerator if vllm else ServedGenerator,
            name="generator",
            num_replicas=generator.replicas,
            python=str(extra_python("vllm", generator.python)) if vllm else None,
            observer=ProcessRecorder("generator", self._telemetry).hear,
            deadline=2 * generator.timeout,
            tries=generator.attempts,
            **self._common,
        )
        self._services["generator"] = await spec.as_service(self._source, self._url, self._config)

    async def advance(self, version: int) -> None:
        """Wait until a version is published, then have all living replicas serve it, and those that start later."""
        telemetry = self._telemetry
        began = telemetry.now()
        with telemetry.doing("driver", "driver", "update", version):
            await self._store.wait(version, PUBLISH_SECONDS)
            names = await self._switch(version)
        self._version, now = version, telemetry.now()
        for each in names:
            telemetry.emit(WeightsServed(time=now, version=version, process=each, seconds=now - began))

    async def _switch(self, version: int) -> tuple[str, ...]:
        """Switch all generators to a version, and replace those that cannot take it; returns the names of the others.

        A generator that comes while a switch is undecided is not a part of it: then the next one names it, too. Raises
        `UpdateFailed` if new generators cannot take the version either.
        """
        service, failures = self._services["generator"], 0
        while True:
            service.check()
            try:
                result = await self._store.switch(version, timeout=UPDATE_SECONDS)
            except Mismatch:  # no reader is there
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            readers = [each for each in await self._store.readers() if each.switched]
            replicas = self._replicas_of(readers)
            if not result.committed:
                failed = [replicas[each] for each in result.refused or result.missing if each in replicas]
                failures += bool(failed)
                if failures == SWITCHES:
                    raise UpdateFailed(version, result.reason)
                for replica in failed:
                    service.replace(replica, f"it could not be brought to version {version}: {result.reason}")
            elif {each.id for each in readers} <= {*result.ready, *result.missing}:
                return tuple(replicas[each] for each in result.ready if each in replicas)

    def _replicas_of(self, readers: Iterable[Reader]) -> dict[str, str]:
        """The living replicas of readers of the store, by their names there."""
        found = {
            (self._engine.host_identity(each.host), each.pid): each.name
            for each in self._services["generator"].status().replicas
            if each.health == "ready"
        }
        known = ((each.id, found.get((each.peer.host, each.pid))) for each in readers)
        return {reader: replica for reader, replica in known if replica is not None}

    async def work(self, role: str) -> Mapping[str, WorkReport]:
        """What each process of a role did since the last call, without those that do not answer."""
        service = self._services.get(role)
        if service is None or not hasattr(service.actor, "work"):
            return {}
        return await answers(service.work)

    def status(self) -> tuple[ServiceStatus, ...]:
        """The services now. May be called from any thread."""
        return tuple(self._status(role, each) for role, each in tuple(self._services.items()))

    def _status(self, role: str, service: Service) -> ServiceStatus:
        status, version = service.status(), self._version
        if role != "generator" or version is None:
            return status
        replicas = [
            msgspec.structs.replace(each, version=version) if each.health == "ready" else each
            for each in status.replicas
        ]
        return msgspec.structs.replace(status, version=version, replicas=tuple(replicas))

    async def close(self) -> None:
        """End all processes. Idempotent."""
        for service in reversed(self._services.values()):
            await service.close()
        await self._store.close()

    async def _route(self, request: SamplingRequest) -> list[Completion]:
        completions: list[Completion] = await self._services["generator"].generate.route(request)
        return completions
