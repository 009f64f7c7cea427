"""`EncodedBatch`: a batch as columns and bytes, which the driver makes once for all trainers, spares included."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Self

import msgspec
import torch

from holdfast.rl.data.buffer_state import BufferState
from holdfast.rl.data.episode import Group
from holdfast.rl.data.replay_buffer import Batch

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
        rewards, prompts, drawn, overlong = list[float](), list[int](), list[int](), list[bool]()
        tokens, logprobs, mask = list[int](), list[float](), list[bool]()
        for group in groups:
            prompt = group.prompt.tokens
            for each in group.episodes:
                rewards.append(each.reward)
                prompts.append(len(prompt))
                drawn.append(len(each.tokens))
                overlong.append(each.finish == "length")
                tokens += prompt
                tokens += each.tokens
                logprobs += each.logprobs
                mask += each.mask
        return cls(
            groups=array("i", [len(group.episodes) for group in groups]).tobytes(),
            rewards=array("d", rewards).tobytes(),
            prompts=array("i", prompts).tobytes(),
            drawn=array("i", drawn).tobytes(),
            overlong=bytes(overlong),
            tokens=array("i", tokens).tobytes(),
            logprobs=array("f", logprobs).tobytes(),
            mask=bytes(mask),
        )

    def __len__(self) -> int:
        """The number of groups."""
        return len(self.groups) // array("i").itemsize

    def group_sizes(self) -> list[int]:
        """The number of episodes of each group."""
        return array("i", self.groups).tolist()

    def rewards_by_group(self) -> list[list[float]]:
        """The rewards of the episodes of each group."""
        rewards, found, begin = array("d", self.rewards).tolist(), [], 0
        for size in self.group_sizes():
            found.append(rewards[begin : begin + size])
            begin += size
        return found

    def tensor(self, name: str) -> Tensor:
        """A field as a tensor on the CPU: int64, float32, or bool."""
        data = bytearray(getattr(self, name))
        stored, wanted = _TYPES[name]
        if not data:
            return torch.zeros(0, dtype=wanted, device="cpu")
        return torch.frombuffer(data, dtype=stored).to(wanted)


_TYPES = {
    "prompts": (torch.int32, torch.int64),
    "drawn": (torch.int32, torch.int64),
    "tokens": (torch.int32, torch.int64),
    "logprobs": (torch.float32, torch.float32),
    "overlong": (torch.uint8, torch.bool),
    "mask": (torch.uint8, torch.bool),
}
"""How the fields that trainers compute with are stored, and the types of their tensors."""


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
