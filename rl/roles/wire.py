"""The messages between the driver and its workers: msgspec over the control channel, never pickle."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import torch

from holdfast.comms.errors import CorruptData
from holdfast.rl.learning import task
from holdfast.rl.learning.generate import Samples
from holdfast.rl.units import Unit


class WorkRequest(msgspec.Struct, frozen=True):
    """A generator's call `work`: the result of unit `done`, and the request for the next unit.

    The result is encoded samples, an encoded `EvaluationScore`, or nothing if the evaluation can no longer be made.
    """

    done: Unit | None = None
    result: bytes = b""


class WorkReply(msgspec.Struct, frozen=True):
    """The next unit; None: call again, or stop if the run is `over`."""

    unit: Unit | None = None
    over: bool = False


class EvaluationScore(msgspec.Struct, frozen=True):
    """The result of an `evaluate` unit: the share of held-out problems answered exactly, and the weights' digest."""

    exact_match: float
    digest: str


class TakeRequest(msgspec.Struct, frozen=True):
    """A trainer's call `take` for the samples of `units`, in `step` of `epoch`; all earlier steps are committed.

    `published` is the newest weights version that the trainer knows to be published.
    """

    step: int
    units: tuple[int, ...]
    epoch: int
    rank: int
    size: int
    published: int


class TakeReply(msgspec.Struct, frozen=True):
    """Encoded samples, in the order of the request; None: they do not exist yet."""

    samples: tuple[bytes, ...] | None = None


class Warmed(msgspec.Struct, frozen=True):
    """A trainer's notice `warmed`: the held-out exact match of its random weights, and the warm-up's last loss."""

    untrained: float
    loss: float


class Reached(msgspec.Struct, frozen=True):
    """A worker's call `reached`: it is at a point where a fault is planned. It may continue at the answer."""

    point: str
    step: int


class Finished(msgspec.Struct, frozen=True):
    """A trainer's call `finished`: all steps are committed; `digest` is that of its final weights."""

    digest: str
    epoch: int
    size: int
    published: int


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """A message, or any of the structs here, as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """The message in `data`. Raises `CorruptData` if it is not of that kind."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptData(f"not a {kind.__name__}: {error}") from error


class _PackedSamples(msgspec.Struct, frozen=True, array_like=True):
    """Tokens and rewards as bytes (one each), log-probabilities as little-endian float32, all row by row."""

    prompts: bytes
    tokens: bytes
    logprobs: bytes
    rewards: bytes


def pack_samples(samples: Samples) -> bytes:
    """Samples as bytes; equal samples give equal bytes."""
    return encode(
        _PackedSamples(
            samples.prompts.to(torch.uint8).numpy().tobytes(),
            samples.tokens.to(torch.uint8).numpy().tobytes(),
            samples.logprobs.numpy().tobytes(),
            samples.rewards.to(torch.uint8).numpy().tobytes(),
        )
    )


def unpack_samples(data: bytes, count: int) -> Samples:
    """The `count` samples in `data`, in memory of their own. Raises `CorruptData` for other data."""
    packed = decode(data, _PackedSamples)
    return Samples(
        _tokens(packed.prompts, count, task.PROMPT_TOKENS),
        _tokens(packed.tokens, count, task.ANSWER_TOKENS),
        _array(packed.logprobs, torch.float32, count, task.ANSWER_TOKENS),
        _array(packed.rewards, torch.uint8, count, 1).view(count).float(),
    )


def _tokens(data: bytes, count: int, width: int) -> torch.Tensor:
    tokens = _array(data, torch.uint8, count, width)
    if int(tokens.max()) >= task.VOCABULARY:
        raise CorruptData(f"token {int(tokens.max())} in a vocabulary of {task.VOCABULARY}")
    return tokens.long()


def _array(data: bytes, dtype: torch.dtype, count: int, width: int) -> torch.Tensor:
    if len(data) != count * width * dtype.itemsize:
        raise CorruptData(f"{len(data)} bytes where {count} x {width} of {dtype} were expected")
    return torch.frombuffer(bytearray(data), dtype=dtype).clone().view(count, width)
