"""A batch on its way to the trainers: columns of bytes, then padded tensors, updates, shards and forwards.

The driver makes the columns once for all trainers, spares included. The division into shards and forwards depends on
the batch and the settings alone, so a shard has the same bits whichever trainer computes it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, Self

import msgspec
import torch

from holdfast.rl.config.run_config import Objective
from holdfast.rl.data.episode import Group
from holdfast.rl.data.replay_buffer import Batch, BufferState, even_edges
from holdfast.rl.grpo.loss import LossInputs

Tensor = torch.Tensor


class BatchColumns(msgspec.Struct, frozen=True, kw_only=True):
    """All episodes of some groups, one after the other. Each field is an array in the byte order of the host.

    `groups` has the number of episodes of each group; `rewards`, `prompts` (the length of its prompt), `drawn` (the
    number of tokens after it) and `overlong` one number for each episode. `tokens` has the prompt and what follows it
    of each episode, `logprobs` and `mask` only the latter.
    """

    groups: bytes
    rewards: bytes
    prompts: bytes
    drawn: bytes
    overlong: bytes
    tokens: bytes
    logprobs: bytes
    mask: bytes

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Self:
        """The columns of groups."""
        found: dict[str, list[Any]] = {name: [] for name in _FORMATS}
        for group in groups:
            prompt = group.prompt.tokens
            found["groups"].append(len(group.episodes))
            for each in group.episodes:
                found["rewards"].append(each.reward)
                found["prompts"].append(len(prompt))
                found["drawn"].append(len(each.tokens))
                found["overlong"].append(each.finish == "length")
                found["tokens"] += prompt
                found["tokens"] += each.tokens
                found["logprobs"] += each.logprobs
                found["mask"] += each.mask
        return cls(**{name: array(code, found[name]).tobytes() for name, (code, _, _) in _FORMATS.items()})

    def __len__(self) -> int:
        """The number of groups."""
        return len(self.groups) // array("i").itemsize

    def group_sizes(self) -> list[int]:
        """The number of episodes of each group."""
        return array("i", self.groups).tolist()

    def rewards_by_group(self) -> list[list[float]]:
        """The rewards of the episodes of each group."""
        rewards = iter(array("d", self.rewards))
        return [list(islice(rewards, size)) for size in self.group_sizes()]

    def tensor(self, name: str) -> Tensor:
        """A field as a tensor on the CPU: int64, float32, or bool."""
        data = bytearray(getattr(self, name))
        _, stored, wanted = _FORMATS[name]
        return torch.frombuffer(data, dtype=stored).to(wanted) if data else torch.zeros(0, dtype=wanted, device="cpu")


_FORMATS = {
    "groups": ("i", torch.int32, torch.int64),
    "rewards": ("d", torch.float64, torch.float64),
    "prompts": ("i", torch.int32, torch.int64),
    "drawn": ("i", torch.int32, torch.int64),
    "overlong": ("B", torch.uint8, torch.bool),
    "tokens": ("i", torch.int32, torch.int64),
    "logprobs": ("f", torch.float32, torch.float32),
    "mask": ("B", torch.uint8, torch.bool),
}
"""How the fields are stored, by the codes of arrays and the types of torch, and the types of their tensors."""


class EncodedBatch(msgspec.Struct, frozen=True):
    """A batch that begins with update `step`.

    `after` is the state of the replay buffer after it as JSON, and decoded only by a run that goes on. It is empty
    unless a checkpoint is written after this batch: the state has every group that waits.
    """

    step: int
    columns: BatchColumns
    after: bytes = b""

    @classmethod
    def of(cls, batch: Batch, *, saved: bool = True) -> Self:
        """Encode a batch; `saved`: with the state of the replay buffer after it."""
        return cls(batch.step, BatchColumns.of(batch.groups), msgspec.json.encode(batch.after) if saved else b"")


def decode_state(after: bytes) -> BufferState:
    """The state of the replay buffer that `EncodedBatch.after` holds."""
    return msgspec.json.decode(after, type=BufferState)


@dataclass(frozen=True, slots=True)
class TrainingTokens:
    """Episodes padded on the right, a row each: `tokens` (n, length) with their prompts, and `attention` (n, length).

    Column c of `inputs` and of log-probabilities belongs to the token in column c + 1: they have one column less.
    `old_logprobs` are those of the policy before the first update of their batch; None at that update.
    """

    tokens: Tensor
    attention: Tensor
    inputs: LossInputs
    old_logprobs: Tensor | None = None

    def shard(self, shard: int, shards: int, micro_batch: int) -> list[TrainingTokens]:
        """The forwards of one of `shards` shards; every shard has equally many.

        A forward that would have no episode has one with a mask that is false everywhere.
        """
        return [self._forward(begin, end) for begin, end in self._forward_edges(shard, shards, micro_batch)]

    def joined(self, shards: int, micro_batch: int, found: Mapping[int, Sequence[Tensor]]) -> Tensor:
        """The rows that forwards of some shards gave, each in its place; 0 in the others."""
        values = torch.zeros(self.inputs.mask.shape, dtype=torch.float32, device="cpu")
        for shard, parts in found.items():
            for (begin, end), part in zip(self._forward_edges(shard, shards, micro_batch), parts, strict=True):
                values[begin:end, : part.shape[1]] = part[: end - begin].cpu()
        return values

    def rows(self, begin: int, end: int) -> TrainingTokens:
        """Some episodes, padded to the longest of them."""
        rows, inputs = slice(begin, end), self.inputs
        length = int(self.attention[rows].sum(1).max())
        columns = slice(length - 1)
        return TrainingTokens(
            self.tokens[rows, :length],
            self.attention[rows, :length],
            replace(
                inputs,
                mask=inputs.mask[rows, columns],
                advantages=inputs.advantages[rows],
                generated=inputs.generated[rows, columns],
            ),
            None if self.old_logprobs is None else self.old_logprobs[rows, columns],
        )

    def _forward_edges(self, shard: int, shards: int, micro_batch: int) -> list[tuple[int, int]]:
        edges = even_edges(len(self.tokens), shards)
        most = max(end - begin for begin, end in edges)
        count = max(1, -(-most // micro_batch)) if micro_batch else 1
        begin, end = edges[shard]
        return [(begin + low, begin + high) for low, high in even_edges(end - begin, count)]

    def _forward(self, begin: int, end: int) -> TrainingTokens:
        if begin < end:
            return self.rows(begin, end)
        alone = self.rows(0, 1)
        return replace(alone, inputs=replace(alone.inputs, mask=torch.zeros_like(alone.inputs.mask)))


def updates_of(columns: BatchColumns, updates: int, objective: Objective) -> list[TrainingTokens]:
    """The updates of a batch, each with consecutive groups. There are at least as many groups as updates."""
    whole, ends = collate(columns, objective), [0, *accumulate(columns.group_sizes())]
    parts = [whole.rows(ends[first], ends[last]) for first, last in even_edges(len(columns), updates)]
    return [replace(part, inputs=replace(part.inputs, totals=_totals(part.inputs.mask))) for part in parts]


def collate(columns: BatchColumns, objective: Objective) -> TrainingTokens:
    """The episodes of a batch as tensors on the CPU."""
    prompts, drawn = columns.tensor("prompts"), columns.tensor("drawn")
    begins, ends = prompts.unsqueeze(1), (prompts + drawn).unsqueeze(1)
    column = torch.arange(int(ends.max()), device="cpu").expand(len(prompts), -1)
    attention = column < ends
    after = (column[:, :-1] >= begins - 1) & (column[:, :-1] < ends - 1)
    weights = advantages(columns.rewards_by_group(), objective)
    mask = _placed(counted_tokens(columns, objective), after)
    return TrainingTokens(
        _placed(columns.tensor("tokens"), attention),
        attention,
        LossInputs(
            mask,
            torch.tensor(weights, dtype=torch.float32, device="cpu"),
            _placed(columns.tensor("logprobs"), after),
            _totals(mask),
        ),
    )


def _totals(mask: Tensor) -> tuple[int, int]:
    return len(mask), max(int(mask.sum()), 1)


def counted_tokens(columns: BatchColumns, objective: Objective) -> Tensor:
    """Which of the tokens after the prompts count in the loss."""
    mask = columns.tensor("mask")
    if objective.skip_overlong:
        mask &= ~columns.tensor("overlong").repeat_interleave(columns.tensor("drawn"))
    return mask


def _placed(values: Tensor, places: Tensor) -> Tensor:
    """The values in the places that are true, row by row; 0 in the others."""
    found = torch.zeros(places.shape, dtype=values.dtype, device="cpu")
    found[places] = values
    return found


def advantages(groups: Sequence[Sequence[float]], objective: Objective) -> tuple[float, ...]:
    """The advantages of the episodes of a batch, from the rewards of each of its groups.

    They are 0 where a whole group is alike. Sums are exact, so the order of the rewards changes no bit. Rewards are as
    `Episode` has them, so all advantages are finite, in float32 too.
    """
    shared = 1.0 if objective.scale_rewards == "none" else 0.0  # 0: each group has a scale of its own
    if objective.scale_rewards == "batch":
        shared = _deviation([each for rewards in groups for each in rewards])
    found: list[float] = []
    for rewards in groups:
        if max(rewards) == min(rewards):
            found += [0.0] * len(rewards)
            continue
        mean, scale = math.fsum(rewards) / len(rewards), shared or _deviation(rewards)
        found += [(reward - mean) / scale for reward in rewards]
    return tuple(found)


def _deviation(rewards: Sequence[float]) -> float:
    """What advantages are divided by: the unbiased standard deviation, and 1e-4."""
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum([(each - mean) ** 2 for each in rewards]) / max(len(rewards) - 1, 1)) + 1e-4
