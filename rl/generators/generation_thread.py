"""The thread of a generator that owns its model: it draws, and changes versions between two tokens."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch

from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators.continuous_batch import ContinuousBatch, RunningRequest
from holdfast.rl.generators.errors import GeneratorClosed
from holdfast.rl.generators.fixed_batch import generate_batch
from holdfast.rl.generators.served_weights import ServedWeights
from holdfast.rl.generators.settings import GeneratorSettings
from holdfast.rl.telemetry import WorkLog

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Reply = Future[list[Completion]]


class GenerationThread:
    """Serves requests in the order in which they come, until it is closed.

    `between` is called between two tokens, in this thread.
    """

    def __init__(
        self,
        weights: ServedWeights,
        settings: GeneratorSettings,
        length: int,
        between: Callable[[], None],
        work: WorkLog | None = None,
    ) -> None:
        self._weights, self._settings, self._between = weights, settings, between
        self._work = work or WorkLog()
        self._batch = ContinuousBatch(settings.slots, length)
        self._queue: deque[tuple[SamplingRequest, Reply]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._pinned = 0
        self._replies: set[Reply] = set()
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """The samples that are being drawn, and the requests that wait."""
        return self._batch.running, len(self._queue)

    def submit(self, request: SamplingRequest) -> Reply:
        """Queue a request. If it names a version, that one must be here. Raises `GeneratorClosed`."""
        reply: Reply = Future()
        with self._changed:
            if self._closed:
                raise GeneratorClosed
            self._queue.append((request, reply))
            self._changed.notify()
        return reply

    def close(self) -> None:
        """End the thread at the next token; open requests get `GeneratorClosed`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._settings.threads)
        serve = self._serve_fixed if self._settings.mode == "fixed" else self._serve_continuous
        try:
            serve()
        finally:
            with self._changed:
                self._closed = True
                left = [*self._replies, *(reply for _, reply in self._queue)]
                self._queue.clear()
            for reply in left:
                _fail(reply, GeneratorClosed())

    def _await_request(self) -> bool:
        """Wait until there is a request; False if this thread is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue)
            return not self._closed

    # -- fixed

    def _serve_fixed(self) -> None:
        while self._await_request():
            with self._changed:
                request, reply = self._queue.popleft()
            if not reply.set_running_or_notify_cancel():
                continue
            try:
                version = self._weights.check_ready() if request.version is None else request.version
                with self._weights.using(version) as model, self._work.doing("generate", version):
                    found = generate_batch(model, version, request, self._between_tokens)
            except Exception as error:
                _fail(reply, error)
            else:
                reply.set_result(found)

    def _between_tokens(self) -> None:
        self._between()
        if self._closed:
            raise GeneratorClosed

    # -- continuous

    def _serve_continuous(self) -> None:
        with ExitStack() as held:
            model: PreTrainedModel | None = None
            current: int | None = None
            while self._batch.busy or self._await_request():
                if self._closed:
                    return
                try:
                    wanted = self._wanted(current)
                    if wanted != current or model is None or self._is_over(wanted, model):
                        held.close()
                        current = None
                        model, current = held.enter_context(self._weights.using(wanted)), wanted
                        held.enter_context(self._work.doing("generate", wanted))
                    self._join(wanted)
                    self._batch.step(model, wanted)
                    self._between()
                except Exception as error:
                    self._drop_all(error)
                if not self._batch.busy:
                    held.close()
                    model, current = None, None

    def _wanted(self, current: int | None) -> int:
        """The version to draw the next tokens with."""
        if not self._batch.busy:
            with self._changed:
                asked = self._queue[0][0].version
            return self._weights.check_ready() if asked is None else asked
        assert current is not None
        newest = self._weights.version
        if self._settings.weight_update == "swap" and not self._pinned and newest is not None:
            return max(current, newest)
        return current

    def _is_over(self, version: int, model: PreTrainedModel) -> bool:
        """Whether the running samples go on with other bytes of the same version: its number was published again."""
        swaps = self._settings.weight_update == "swap" and not self._pinned
        return swaps and not self._weights.has_in(version, model)

    def _join(self, version: int) -> None:
        """Add the requests to the batch that may be served with `version`, in their order, up to the first other."""
        draining = self._settings.weight_update == "drain" and version != self._weights.version
        while True:
            with self._changed:
                if not self._queue:
                    return
                request, reply = self._queue[0]
                if request.version != version and (request.version is not None or (draining and self._batch.busy)):
                    return
                self._queue.popleft()
            if not reply.set_running_or_notify_cancel():
                continue
            exact = request.version is not None
            self._pinned += exact
            self._replies.add(reply)
            self._batch.add(RunningRequest(request, partial(self._reply, reply, exact)))

    def _reply(self, reply: Reply, exact: bool, found: list[Completion]) -> None:
        self._pinned -= exact
        self._replies.discard(reply)
        reply.set_result(found)

    def _drop_all(self, error: Exception) -> None:
        """Answer all requests of the batch, or the next one if there is none, with `error`."""
        self._batch.drop_all()
        self._pinned = 0
        if not self._replies:
            with self._changed:
                _, reply = self._queue.popleft()
            if reply.set_running_or_notify_cancel():
                _fail(reply, error)
        while self._replies:
            _fail(self._replies.pop(), error)


def _fail(reply: Reply, error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
