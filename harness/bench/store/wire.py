"""The messages between the bench and its workers: a worker is one publisher, holder or reader of one contestant."""

from __future__ import annotations

from typing import Literal

import msgspec


class TensorShape(msgspec.Struct, frozen=True):
    """A tensor of the state that is handed over; `dtype` is torch's name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


How = Literal["get", "follow", "copy", "load", "map", "whole"]


class StoreWorkerReady(msgspec.Struct, frozen=True, tag=True):
    """A worker is ready. `detail` names the library and its version."""

    role: str
    rank: int
    pid: int
    detail: str


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """What the state is; a source has values of `seed`.

    `sharded` (publishers, readers): the publishers are ranks of FSDP, the readers ranks of tensor parallelism.
    """

    tensors: tuple[TensorShape, ...]
    seed: int
    sharded: tuple[int, int] | None = None


class Change(msgspec.Struct, frozen=True, tag=True):
    """Make the source that of a version: a `share` of its elements differ, and one at least; answered by `Digests`."""

    version: int
    share: float = 0.0


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Publish the source as a version; answered by `Took`."""

    version: int


class Blank(msgspec.Struct, frozen=True, tag=True):
    """Overwrite the target, so that nothing in it can be right by chance; answered by `Done`."""


class Get(msgspec.Struct, frozen=True, tag=True):
    """Get a version into the target, or do what `how` says; answered by `Took`.

    "follow": as soon as it is published. "copy": the same copies without a check. "load", "map": new tensors.
    "whole": all of each tensor, whatever the shards of this reader are.
    """

    version: int
    how: How = "get"


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compare what was got last with the digests of its tensors; answered by `Checked`."""

    digests: tuple[int, ...]


class StopStoreWorker(msgspec.Struct, frozen=True, tag=True):
    """Close and exit."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The order was carried out."""


class Took(msgspec.Struct, frozen=True, tag=True):
    """When the op began and ended (CLOCK_MONOTONIC, seconds), the same clock in all processes.

    `memory`: the bytes of private memory that the process has more since.
    """

    began: float
    ended: float
    memory: int


class Digests(msgspec.Struct, frozen=True, tag=True):
    """The digests of the tensors of the source: of those of each reader's shards, and of the whole ones."""

    shards: tuple[tuple[int, ...], ...]
    whole: tuple[int, ...]


class Checked(msgspec.Struct, frozen=True, tag=True):
    """How many tensors of the target are wrong."""

    wrong: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The order raised."""

    text: str


Order = Prepare | Change | Publish | Blank | Get | Check | StopStoreWorker
Answer = Done | Took | Digests | Checked | Failed
Message = StoreWorkerReady | Order | Answer
DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
