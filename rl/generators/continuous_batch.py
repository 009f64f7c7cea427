"""Continuous mode: sequences of different lengths join and leave a running batch at token boundaries.

The running sequences fill the first slots of one static cache. If the weights change between two tokens, the keys and
values of earlier tokens stay: they are of earlier weights than the tokens that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from holdfast.rl.data.episode import Completion, Finish, SamplingRequest
from holdfast.rl.generators.drawing import draw, uniforms
from holdfast.rl.generators.fixed_batch import prefill
from holdfast.rl.generators.slot_cache import SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
