"""`TransformersGenerator`: an actor that draws completions from a causal language model of transformers.

Its thread owns the model: it draws, and swaps weights in between two tokens. The running sequences fill the first slots
of one static cache. After a swap the keys and values of earlier tokens stay: they are of earlier weights.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Self

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.ft import faultpoints
from holdfast.rl.actors.engine import endpoint
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Completion, Finish, SamplingRequest
from holdfast.rl.generators.errors import BadRequest, GenerationTimeout, GeneratorClosed, GeneratorNotReady, VersionGone
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.telemetry import WorkLog, WorkReport
from holdfast.store import Follower, NotCaughtUp, StoreTimeout, WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Tensor = torch.Tensor


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """The random numbers of samples, float64 (samples, count) in [0, 1): those of a row depend on its seed alone."""
    found = torch.empty(len(seeds), count, dtype=torch.float64, device="cpu")
    random = torch.Generator("cpu")
    for row, seed in zip(found, seeds, strict=True):
        random.manual_seed(seed)
        torch.rand(count, dtype=torch.float64, generator=random, out=row, device="cpu")
    return found


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token for each row of `logits` (rows, vocabulary); returns tokens and their log-probs, each (rows,).

    `temperature`, `top_p` and `uniform` are (rows,).
    """
    greedy = temperature == 0.0
    scale = torch.where(greedy, 1.0, temperature).unsqueeze(1)
    logprobs = (logits.float() / scale).log_softmax(-1)
    tokens = _inverted(_nucleus(logprobs.exp(), top_p), uniform)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _inverted(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds `uniform` of the total."""
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform * total, below)
    return torch.searchsorted(cumulative, threshold.unsqueeze(1), right=True).squeeze(1)


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Set those tokens to 0 that are not among the likeliest ones which together reach `top_p`."""
    if bool((top_p >= 1.0).all()):
        return probabilities
    ordered, order = probabilities.sort(stable=True, dim=-1, descending=True)
    before = ordered.double().cumsum(-1) - ordered.double()
    ordered = ordered.masked_fill((before >= top_p.unsqueeze(1)) & (top_p < 1.0).unsqueeze(1), 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)


def prefill(model: PreTrainedModel, prompts: list[tuple[int, ...]]) -> tuple[SlotCache, Tensor, int]:
    """Run prompts through the model: their cache, the logits (prompts, vocabulary) after each, the longest's length."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    cache = SlotCache(len(prompts), longest)
    device = model.device
    tokens = torch.tensor([prompt + (0,) * (longest - len(prompt)) for prompt in prompts], device=device)
    columns = sorted({length - 1 for length in lengths})
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    if len(columns) == 1:
        return cache, cache.forward(model, tokens, positions, 0)[:, -1], longest
    logits = cache.forward(model, tokens, positions, 0, torch.tensor(columns, device=device))
    chosen = torch.tensor([columns.index(length - 1) for length in lengths], device=device)
    return cache, logits[torch.arange(len(prompts), device=device), chosen], longest


class SlotCache:
    """Keys and values of all layers for `slots` sequences of at most `length` tokens.

    Token i of a sequence lies at position i of its slot, whatever the length of the others. It has the methods that
    models call of transformers' `Cache`.
    """

    is_compileable = False

    def __init__(self, slots: int, length: int) -> None:
        self._slots, self._length = slots, length
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._rows = self._span = 0
        self._start: int | None = None
        self._index: tuple[Tensor, Tensor] | None = None

    def forward(
        self, model: PreTrainedModel, tokens: Tensor, positions: Tensor, start: int | None, last: Tensor | int = 1
    ) -> Tensor:
        """The logits that follow `tokens` (rows, n), one sequence a row, in the first slots.

        `positions` (rows, n) are those of the tokens; `start` is the first one if all rows have the same. `last` are
        the columns to return logits of (a number: the last so many).
        """
        rows, count = tokens.shape
        span = int(positions.max()) + 1 if start is None else start + count
        self._rows, self._span, self._start = rows, span, start
        if start is None:
            self._index = (torch.arange(rows, device=tokens.device).unsqueeze(1), positions)
            hidden = torch.arange(span, device=tokens.device) > positions.unsqueeze(2)
        else:
            hidden = torch.ones(1, count, span, dtype=torch.bool, device=tokens.device).triu(start + 1)
        lowest = torch.finfo(model.dtype).min
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=tokens.device).masked_fill_(hidden, lowest)
        call: Any = model
        logits: Tensor = call(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask.unsqueeze(1),
            past_key_values=self,
            use_cache=True,
            logits_to_keep=last,
        ).logits
        return logits

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store the keys and values (rows, heads, n, size) of one layer; returns those of the whole sequences."""
        if layer == len(self._layers):
            self._layers.append((self._room(keys), self._room(values)))
        kept_keys, kept_values = (each[: self._rows, :, : self._span] for each in self._layers[layer])
        if self._start is not None:
            kept_keys[:, :, self._start :] = keys
            kept_values[:, :, self._start :] = values
        else:
            assert self._index is not None
            row, position = self._index
            kept_keys[row, :, position] = keys.transpose(1, 2)
            kept_values[row, :, position] = values.transpose(1, 2)
        return kept_keys, kept_values

    def get_seq_length(self, layer: int = 0) -> int:
        """The tokens of the longest sequence in the last forward."""
        return self._span

    def copy_from(self, other: SlotCache, rows: Tensor, first: int, span: int) -> None:
        """Copy the first `span` positions of the slots `rows` of `other` into the slots from `first` on."""
        if not self._layers:
            self._layers = [(self._room(keys), self._room(values)) for keys, values in other._layers]
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            for here, there in zip(mine, theirs, strict=True):
                here[first : first + len(rows), :, :span] = there[:, :, :span][rows]

    def move(self, source: int, target: int, span: int) -> None:
        """Copy the first `span` positions of a slot into another slot."""
        for layer in self._layers:
            for each in layer:
                each[target, :, :span] = each[source, :, :span]

    def _room(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return torch.zeros(self._slots, heads, self._length, size, dtype=like.dtype, device=like.device)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sample that is being drawn."""

    prompt: tuple[int, ...]
    request: RunningRequest
    random: list[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def cached(self) -> int:
        """The number of its tokens in the cache: all but the last one drawn."""
        return len(self.prompt) + len(self.tokens) - 1

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish=self.finish,
        )


class RunningRequest:
    """A request in the batch; `done` gets its completions, those of a prompt side by side, once all are drawn."""

    def __init__(self, request: SamplingRequest, done: Callable[[list[Completion]], None]) -> None:
        self.request, self._done = request, done
        random = uniforms(request.seeds, request.max_new_tokens).tolist()
        prompts = [prompt for prompt in request.prompts for _ in range(request.samples)]
        self.sequences = [_Sequence(prompt, self, row) for prompt, row in zip(prompts, random, strict=True)]
        self._left = len(self.sequences)

    def ended(self) -> None:
        """Count one more sequence as drawn."""
        self._left -= 1
        if not self._left:
            self._done([each.completion() for each in self.sequences])


class ContinuousBatch:
    """The running batch: at most `slots` sequences of at most `length` tokens each, prompt included."""

    def __init__(self, slots: int, length: int) -> None:
        self._slots = slots
        self._cache = SlotCache(slots, length)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []

    @classmethod
    def of(cls, running: RunningRequest) -> Self:
        """A batch of one request alone: its completions are a function of the request and the weights."""
        request = running.request
        batch = cls(len(request.seeds), max(map(len, request.prompts)) + request.max_new_tokens)
        batch.add(running)
        return batch

    @property
    def running(self) -> int:
        """The number of sequences that have a slot."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether a sequence runs or waits for a slot."""
        return bool(self._running or self._waiting)

    def add(self, request: RunningRequest) -> None:
        """Queue the sequences of a request: they take slots in order as these become free."""
        self._waiting.extend(request.sequences)

    def drop_all(self) -> None:
        """Forget all sequences."""
        self._waiting.clear()
        self._running.clear()

    @torch.no_grad()
    def step(self, model: PreTrainedModel, version: int) -> None:
        """Draw the next token of each running sequence, and the first one of those that get a slot now."""
        running = len(self._running)
        if running:
            tokens = torch.tensor([[each.tokens[-1]] for each in self._running], device=model.device)
            positions = torch.tensor([[each.cached] for each in self._running], device=model.device)
            lowest, highest = int(positions.min()), int(positions.max())
            logits = self._cache.forward(model, tokens, positions, highest if lowest == highest else None)[:, 0]
            _append(self._running, logits, version)
        if self._waiting and running < self._slots:
            self._admit(model, version)
        for index in reversed(range(len(self._running))):
            if self._running[index].finish is not None:
                self._release(index)

    def _admit(self, model: PreTrainedModel, version: int) -> None:
        first = len(self._running)
        count = min(self._slots - first, len(self._waiting))
        joining = [self._waiting.popleft() for _ in range(count)]
        prompts = list(dict.fromkeys(each.prompt for each in joining))
        origin = torch.tensor([prompts.index(each.prompt) for each in joining], device=model.device)
        cache, logits, longest = prefill(model, prompts)
        self._cache.copy_from(cache, origin, first, longest)
        _append(joining, logits[origin], version)
        self._running += joining

    def _release(self, index: int) -> None:
        """Take a finished sequence out; the last one moves into its slot."""
        ended, last = self._running[index], self._running.pop()
        if last is not ended:
            self._running[index] = last
            self._cache.move(len(self._running), index, last.cached)
        ended.request.ended()


def _append(sequences: list[_Sequence], logits: torch.Tensor, version: int) -> None:
    """Draw one more token for each sequence."""
    asked = [each.request.request for each in sequences]
    tokens, logprobs = draw(
        logits,
        torch.tensor([each.temperature for each in asked], device=logits.device),
        torch.tensor([each.top_p for each in asked], device=logits.device),
        torch.tensor([each.random[len(each.tokens)] for each in sequences], dtype=torch.float64, device=logits.device),
    )
    for each, request, token, logprob in zip(sequences, asked, tokens.tolist(), logprobs.tolist(), strict=True):
        each.tokens.append(token)
        each.logprobs.append(logprob)
        each.versions.append(version)
        if token in request.stop:
            each.finish = "stop"
        elif len(each.tokens) == request.max_new_tokens:
            each.finish = "length"


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
    source, as version 0. It serves the newest version; as a `reader`, what `switch` commits, and has caught up once it
    is made. In the synchronous mode each request is a batch alone: its completions are a function of the
    request and the weights; else samples of any requests share a running batch. Raises `ModelMisfit` if the model
    cannot serve.
    """

    def __init__(
        self,
        source: ModelSource,
        store: str | None = None,
        config: RunConfig = RunConfig(),  # noqa: B008  (frozen)
        reader: bool = False,
    ) -> None:
        if reader:
            faultpoints.arm_from_environment()
        self._timeout = config.generator.timeout
        length, model = source.longest_sequence(), source.build()
        self._limits = RequestLimits(length, int(model.config.vocab_size))
        self._work = WorkLog()
        self._store = None if store is None else WeightStore(store, hold=False)
        self._follower: Follower | None = None
        try:
            if self._store is not None:
                cast = None if config.store.cast == "none" else config.store.cast
                name = new_reader() if reader else None
                self._follower = self._store.follow(model.state_dict(), reader=name, cast=cast, timeout=self._timeout)
                if reader:
                    catch_up_if_switched(self._follower)
            self._thread = GenerationThread(model, self._follower, config, length, self._work)
        except BaseException:
            if self._store is not None:
                self._store.close()
            raise

    @property
    def version(self) -> int | None:
        """The version that serves requests which name none; None before the first."""
        return self._thread.version

    @endpoint(idempotent=True)
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


def new_reader() -> str:
    """A name for a generator among the readers of the store."""
    return f"generator-{token_hex(4)}"


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

    `follower` keeps the tensors of `model` at the version to serve; without one they are version 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        follower: Follower | None,
        config: RunConfig,
        length: int,
        work: WorkLog,
    ) -> None:
        self._model, self._follower, self._config = model, follower, config
        self._work = work
        self._alone = config.algorithm.mode == "synchronous"
        self._batch = ContinuousBatch(config.sampling.slots, length)
        self._queue: deque[tuple[SamplingRequest, Reply]] = deque()
        self._changed = threading.Condition() if follower is None else follower.changed
        self._closed = False
        self._pinned = 0
        self._replies: set[Reply] = set()
        self._recorded: int | None = None
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
            try:
                running = RunningRequest(request, partial(self._reply, reply, exact))
                if self._alone:
                    self._batch = ContinuousBatch.of(running)
                else:
                    self._batch.add(running)
            except Exception as error:  # such as no memory for it: the others go on
                self._pinned -= exact
                self._replies.discard(reply)
                _fail(reply, error)
        self._record()
        if not self._batch.busy:
            return
        version = self.version
        assert version is not None
        try:
            self._batch.step(self._model, version)
            if self._batch.busy:
                faultpoints.reach("generate.between_tokens", version, -1, 0)
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
        """Record what is drawn with one version, in one piece."""
        drawing = self.version if self._batch.busy else None
        if drawing != self._recorded:
            self._work.lasting("generate", drawing, time.thread_time())
            self._recorded = drawing

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
