"""How a generator draws: a running batch, of one request, or of those that join and leave it.

The running sequences fill the first slots of one static cache. If the weights change between two tokens, the keys and
values of earlier tokens stay: they are of earlier weights than the tokens that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch

from holdfast.rl.data.episode import Completion, Finish, SamplingRequest

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
