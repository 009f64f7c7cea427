"""`TransformersGenerator`: an actor that draws completions from a causal language model of transformers.

Its thread owns the model: it draws, and swaps weights in between two tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators.batches import ContinuousBatch, RunningRequest
from holdfast.rl.generators.errors import BadRequest, GenerationTimeout, GeneratorClosed, GeneratorNotReady, VersionGone
from holdfast.rl.generators.models import ModelSource, longest_sequence
from holdfast.rl.telemetry import WorkLog, WorkReport
from holdfast.store import Follower, NotCaughtUp, StoreTimeout, WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Reply = Future[list[Completion]]

LOOK_SECONDS = 0.2
"""The longest wait for weights that must come before the next request."""


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


class TransformersGenerator:
    """A generator: its methods are the endpoints of an actor. `generate` may be called twice.

    `source` is the model, `store` the URL of the store with its weights; without one, the weights are those of the
    source, as version 0. It serves the newest version; as a `reader` with a name, what `switch` commits: it has caught
    up once it is made. In the synchronous mode each request is a batch alone, whose completions are a function of the
    request and the weights; else samples of any requests share a running batch. `between` is called between two
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
            return await asyncio.wait_for(reply, max(left, 0.001))
        except TimeoutError as error:
            raise GenerationTimeout(self._timeout, len(request.seeds)) from error

    async def update(self, version: int) -> int:
        """Wait for a version, which is served from the next token on unless a newer one is; returns its number.

        If it cannot be read, the generator is not ready until that worked. Raises `VersionGone`, the store's errors.
        """
        await asyncio.to_thread(self._await_here, version)
        return version

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


class GenerationThread:
    """Serves requests in the order in which they come, until it is closed.

    `follower` keeps the tensors of `model` at the version to serve; without one they are version 0. `between` is called
    between two tokens, in this thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        follower: Follower | None,
        config: RunConfig,
        length: int,
        between: Callable[[], None],
        work: WorkLog,
    ) -> None:
        self._model, self._follower, self._config = model, follower, config
        self._between, self._work = between, work
        self._alone = config.algorithm.mode == "synchronous"
        self._batch = ContinuousBatch(config.sampling.slots, length)
        self._queue: deque[tuple[SamplingRequest, Reply]] = deque()
        self._changed = threading.Condition() if follower is None else follower.changed
        self._closed = False
        self._pinned = 0
        self._replies: set[Reply] = set()
        self._span: tuple[int, float, float] | None = None
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        """The version of the weights in the model; None before the first."""
        return 0 if self._follower is None else self._follower.version

    def submit(self, request: SamplingRequest) -> Reply:
        """Queue a request. Raises `GeneratorClosed`."""
        reply: Reply = Future()
        with self._changed:
            if self._closed:
                raise GeneratorClosed
            self._queue.append((request, reply))
            self._changed.notify_all()
        return reply

    def close(self) -> None:
        """End the thread at the next token; open requests get `GeneratorClosed`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            while self._batch.busy or self._await_request():
                if self._closed:
                    return
                self._draw_next()
        finally:
            with self._changed:
                self._closed = True
                left = [*self._replies, *(reply for _, reply in self._queue)]
                self._queue.clear()
            for reply in left:
                _fail(reply, GeneratorClosed())

    def _await_request(self) -> bool:
        """Wait until there is a request, and swap in what comes meanwhile; False if this thread is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue or self._is_due())
                if self._closed or self._queue:
                    return not self._closed
            self._swap_if_due()

    def _draw_next(self) -> None:
        """Draw the next token of each running sample, and the first one of those that join now."""
        if self._batch.busy and self._may_swap:
            self._swap_if_due()
        while not (self._alone and self._batch.busy) and (found := self._next()) is not None:
            request, reply = found
            exact = request.version is not None
            self._pinned += exact
            self._replies.add(reply)
            running = RunningRequest(request, partial(self._reply, reply, exact))
            if self._alone:
                self._batch = ContinuousBatch.of(running)
            else:
                self._batch.add(running)
        self._record()
        if not self._batch.busy:
            return
        version = self.version
        assert version is not None
        try:
            self._batch.step(self._model, version)
            if self._batch.busy:
                self._between()
        except Exception as error:
            self._batch.drop_all()
            self._pinned = 0
            while self._replies:
                _fail(self._replies.pop(), error)
        self._record()

    def _reply(self, reply: Reply, exact: bool, found: list[Completion]) -> None:
        self._pinned -= exact
        self._replies.discard(reply)
        reply.set_result(found)

    def _record(self) -> None:
        """Record what was drawn with one version, in one piece."""
        now = self.version if self._batch.busy else None
        if self._span is not None and self._span[0] != now:
            number, began, cpu = self._span
            self._work.add("generate", number, began, time.thread_time() - cpu)
            self._span = None
        if self._span is None and now is not None:
            self._span = now, time.monotonic(), time.thread_time()

    # -- the next request, and the weights that it gets

    def _next(self) -> tuple[SamplingRequest, Reply] | None:
        """Take the next request that the weights may serve now; None if there is none, or it must wait.

        A request that names a version gets exactly that one. Another one gets the version that is to be served.
        """
        while True:
            with self._changed:
                if not self._queue:
                    return None
                request, reply = self._queue[0]
            error: Exception | None = None
            try:
                if not reply.cancelled() and not self._may_serve(request):
                    return None
            except Exception as refused:
                error = refused
            with self._changed:
                self._queue.popleft()
            if not reply.set_running_or_notify_cancel():
                continue
            if error is None:
                return request, reply
            reply.set_exception(error)

    def _may_serve(self, request: SamplingRequest) -> bool:
        """Whether a request may be drawn now; False if it must wait for other weights or for the running samples.

        Raises `GeneratorNotReady`, `VersionGone`.
        """
        if request.version is not None and request.version == self.version:
            return True
        if self._follower is not None and not self._make_current(self._follower):
            return False
        version = self.version
        if request.version is None or request.version == version:
            return True
        if version is not None and (self._follower is None or version > request.version):
            raise VersionGone(request.version, [version])
        return self._wait()

    def _make_current(self, follower: Follower) -> bool:
        """Swap in the version to serve; False if that is not here yet, or running samples need the one before."""
        if follower.failure is not None:
            raise GeneratorNotReady(why_not_ready(follower))
        try:
            if self._batch.busy and not self._may_swap:
                return follower.is_current()
            with self._loading():
                follower.swap()
        except NotCaughtUp as error:
            if error.needs is None:
                raise GeneratorNotReady(why_not_ready(follower)) from error
            return self._wait()
        except HoldfastError:  # of the background, which `failure` tells of, or it was overcome
            return self._wait()
        return True

    def _wait(self) -> bool:
        """Wait for a change, unless samples are running; False."""
        with self._changed:
            if not self._batch.busy and not self._closed:
                self._changed.wait(LOOK_SECONDS)
        return False

    @property
    def _may_swap(self) -> bool:
        """Whether samples that run may go on with other weights."""
        return not self._alone and self._config.generator.update == "swap" and not self._pinned

    def _is_due(self) -> bool:
        return self._follower is not None and self._follower.is_due()

    def _swap_if_due(self) -> None:
        """Swap in what is here. An error leaves the weights; requests get what the follower says of it."""
        if self._follower is not None and self._follower.is_due():
            try:
                with self._loading():
                    self._follower.swap()
            except HoldfastError:
                self._wait()

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Record a swap, if there was one."""
        before, began, cpu = self.version, time.monotonic(), time.thread_time()
        yield
        if (version := self.version) is not None and version != before:
            self._work.add("load_weights", version, began, time.thread_time() - cpu)


def why_not_ready(follower: Follower) -> str:
    """Why a generator may not serve: its update failed, or no version came yet; "" if it may."""
    if (failure := follower.failure) is not None:
        return f"its last update failed: {failure}"
    return "no version of the weights is here yet" if follower.version is None else ""


def _fail(reply: Reply, error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
