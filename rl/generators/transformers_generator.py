"""`TransformersGenerator`: an actor that draws completions from a causal language model of transformers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators.errors import BadRequest, GenerationTimeout, VersionGone
from holdfast.rl.generators.generation_thread import LOOK_SECONDS, GenerationThread, why_not_ready
from holdfast.rl.generators.models import ModelSource, longest_sequence
from holdfast.rl.telemetry import WorkLog, WorkReport
from holdfast.store import Follower, NotCaughtUp, StoreTimeout, WeightStore


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The tokens of a sample, prompt included, and those that the model knows, numbered from 0."""

    length: int
    vocabulary: int

    def check(self, request: SamplingRequest) -> None:
        """Raise `BadRequest` unless the request keeps within the limits."""
        longest = max(map(len, request.prompts)) + request.max_new_tokens
        if longest > self.length:
            raise BadRequest(
                f"its longest prompt and max_new_tokens make {longest} tokens, and a sample has at most {self.length}",
                "shorten the prompt, or lower max_new_tokens",
            )
        highest = max(map(max, request.prompts))
        if highest >= self.vocabulary:
            raise BadRequest(
                f"a prompt has token {highest}, and the model {self.vocabulary} tokens",
                "take the model's own tokenizer",
            )


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
    source, as version 0. It serves the newest version; as a `reader` with a name, what `switch` commits: it has caught
    up once it is made. In the synchronous mode each request is one static batch, whose completions are a function of
    the request and the weights; else samples of any requests share a running batch. `between` is called between two
    tokens. Raises `ModelMisfit` if the model cannot serve.
    """

    def __init__(
        self,
        source: ModelSource,
        store: str | None = None,
        config: RunConfig = RunConfig(),  # noqa: B008  (frozen)
        between: Callable[[], None] = lambda: None,
        reader: str | None = None,
    ) -> None:
        self._timeout = config.generator.timeout
        model = source.build()
        length = longest_sequence(model)
        self._limits = RequestLimits(length, int(model.config.vocab_size))
        self._work = WorkLog()
        self._requests = self._tokens = 0
        self._store = None if store is None else WeightStore(store, hold=False)
        self._follower: Follower | None = None
        try:
            if self._store is not None:
                cast = None if config.store.cast == "none" else config.store.cast
                self._follower = self._store.follow(model.state_dict(), reader=reader, cast=cast, timeout=self._timeout)
                if reader is not None:
                    catch_up_if_switched(self._follower)
            self._thread = GenerationThread(model, self._follower, config, length, between, self._work)
        except BaseException:
            if self._store is not None:
                self._store.close()
            raise

    @property
    def version(self) -> int | None:
        """The version that serves requests which name none; None before the first."""
        return self._thread.version

    async def generate(self, request: SamplingRequest) -> list[Completion]:
        """The completions of a request, those of one prompt side by side.

        If the request names a version, wait for exactly that one. Raises `GeneratorNotReady`, `VersionGone`,
        `BadRequest`, `GenerationTimeout`, `GeneratorClosed`, and `StoreTimeout` if the version does not come.
        """
        self._limits.check(request)
        began = time.monotonic()
        if request.version is not None and request.version != self.version:
            await asyncio.to_thread(self._await_here, request.version)
        left = self._timeout - (time.monotonic() - began)
        reply = asyncio.wrap_future(self._thread.submit(request))
        try:
            found = await asyncio.wait_for(reply, max(left, 0.001))
        except TimeoutError as error:
            raise GenerationTimeout(self._timeout, len(request.seeds)) from error
        self._requests += 1
        self._tokens += sum(len(each.tokens) for each in found)
        return found

    async def update(self, version: int) -> int:
        """Wait for a version, which is served from the next token on unless a newer one is; returns its number.

        If it cannot be read, the generator is not ready until that worked. Raises `VersionGone`, the store's errors.
        """
        await asyncio.to_thread(self._await_here, version)
        return version

    async def catch_up(self) -> int:
        """Wait for the store's newest version, and serve it; returns its number. Raises the errors of `update`."""
        if self._store is None:
            return 0
        return await self.update(await asyncio.to_thread(self._store.wait, 0, self._timeout))

    def _await_here(self, version: int) -> None:
        """Wait until a version is here, or a newer one is served."""
        if self._store is None or self._follower is None:
            if version:
                raise VersionGone(version, [0])
            return
        follower, deadline = self._follower, time.monotonic() + self._timeout
        await_visible(self._store, version, deadline)
        failures = follower.failures
        while not follower.ready(version) and (self.version is None or self.version < version):
            if follower.failure is not None and follower.failures > failures:
                raise follower.failure.again()
            left = deadline - time.monotonic()
            try:
                follower.wait_ready(version, max(0.0, min(left, LOOK_SECONDS)))
            except StoreTimeout:
                if left <= 0:
                    raise

    async def health(self) -> GeneratorHealth:
        """The state of this generator."""
        running, waiting = self._thread.load
        failure = why_not_ready(self._follower) if self._follower is not None else ""
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
        if self._store is not None:
            self._store.close()


def catch_up_if_switched(follower: Follower) -> None:
    """Swap in the version that the readers of the store serve, if a switch was committed."""
    try:
        follower.swap()
    except NotCaughtUp as error:
        if error.needs is not None:
            follower.catch_up()


def await_visible(store: WeightStore, version: int, deadline: float) -> None:
    """Wait until a version is in the store. Raises `VersionGone`, `StoreTimeout`."""
    there = store.versions()
    if version in there:
        return
    if there and there[-1] > version:
        raise VersionGone(version, there)
    while store.wait(version, max(0.0, deadline - time.monotonic())) > version:
        there = store.versions()
        if version not in there:
            raise VersionGone(version, there)
        return
