"""`TransformersGenerator`: an actor that draws completions from a causal language model of transformers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators.errors import GenerationTimeout, GeneratorNotReady, ModelMisfit
from holdfast.rl.generators.generation_thread import GenerationThread
from holdfast.rl.generators.models import ModelSource, longest_sequence
from holdfast.rl.generators.request_limits import RequestLimits
from holdfast.rl.generators.served_weights import ServedWeights
from holdfast.rl.generators.settings import GeneratorSettings
from holdfast.rl.telemetry import WorkLog, WorkReport
from holdfast.store import WeightStore


class GeneratorHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a generator: the version it serves, whether it may, and its load."""

    version: int | None
    ready: bool
    running: int
    waiting: int
    requests: int
    tokens: int
    failure: str = ""


class TransformersGenerator:
    """A generator: its methods are the endpoints of an actor. `generate` may be called twice.

    `source` is the model, `store` the URL of the store with its weights; without one, the weights are those of the
    source, as version 0. `between` is called between two tokens. Raises `ModelMisfit` if the model cannot serve.
    """

    def __init__(
        self,
        source: ModelSource,
        store: str | None = None,
        settings: GeneratorSettings = GeneratorSettings(),  # noqa: B008  (frozen)
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        probe = source.build()
        most = longest_sequence(probe)
        length = settings.length or most
        if length > most:
            raise ModelMisfit(source.name, f"length={length}, and it attends to {most}", "lower `length`")
        self._limits = RequestLimits(length, int(probe.config.vocab_size))
        built = [probe]
        self._store = None if store is None else WeightStore(store, hold=settings.hold)
        self._work = WorkLog()
        self._weights = ServedWeights(
            lambda: built.pop() if built else source.build(), self._store, settings.models, self._work
        )
        self._thread = GenerationThread(self._weights, settings, length, between, self._work)
        self._requests = self._tokens = 0
        if settings.follow:
            self._weights.follow()

    @property
    def version(self) -> int | None:
        """The version that serves requests which name none; None before the first."""
        return self._weights.version

    async def generate(self, request: SamplingRequest) -> list[Completion]:
        """The completions of a request, those of one prompt side by side.

        If the request names a version, wait for exactly that one. Raises `GeneratorNotReady`, `VersionGone`,
        `BadRequest`, `GenerationTimeout`, `GeneratorClosed`, and `StoreTimeout` if the version does not come.
        """
        self._limits.check(request)
        began = time.monotonic()
        if request.version is None:
            self._weights.check_ready()
        elif not self._weights.has(request.version):
            await asyncio.to_thread(self._weights.update, request.version, self._settings.timeout)
        left = self._settings.timeout - (time.monotonic() - began)
        reply = asyncio.wrap_future(self._thread.submit(request))
        try:
            found = await asyncio.wait_for(reply, max(left, 0.001))
        except TimeoutError as error:
            raise GenerationTimeout(self._settings.timeout, len(request.seeds)) from error
        self._requests += 1
        self._tokens += sum(len(each.tokens) for each in found)
        return found

    async def update(self, version: int) -> int:
        """Read a version and serve it, unless a newer one is served; returns its number.

        If that fails, the generator is not ready until an update worked. Raises `VersionGone`, the store's errors.
        """
        return await asyncio.to_thread(self._weights.update, version, self._settings.timeout)

    async def catch_up(self) -> int:
        """Wait for the store's newest version, and serve it; returns its number. Raises the errors of `update`."""
        return await asyncio.to_thread(self._weights.update, None, self._settings.timeout)

    async def health(self) -> GeneratorHealth:
        """The state of this generator."""
        running, waiting = self._thread.load
        failure = ""
        try:
            self._weights.check_ready()
        except GeneratorNotReady as error:
            failure = error.why
        return GeneratorHealth(
            version=self.version,
            ready=not failure,
            running=running,
            waiting=waiting,
            requests=self._requests,
            tokens=self._tokens,
            failure=failure,
        )

    async def work(self) -> WorkReport:
        """What this generator did since the last call."""
        return self._work.report()

    def close(self) -> None:
        """End its threads and leave the store; open requests get `GeneratorClosed`. Idempotent."""
        self._thread.close()
        self._weights.close()
        if self._store is not None:
            self._store.close()
