"""`HoldfastCheckpointEngine`: the weight store as a checkpoint engine of verl's, from trainers to rollout workers.

verl's configuration loads it:

    actor_rollout_ref.rollout.checkpoint_engine.backend: holdfast
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module: holdfast.store.interop.verl_engine
    actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.holdfast.url: sqlite:////shared/weights.sqlite

Each trainer publishes its share of the tensors, and each rollout worker reads them from the trainers' memory. A worker
that was replaced reads the newest version when it likes: there is no group to rebuild.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from holdfast.comms.errors import HoldfastError
from holdfast.store.weight_store import WeightStore

Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]]
Kwargs = dict[str, list[Any]]


@CheckpointEngineRegistry.register("holdfast")
class HoldfastCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One of a worker. `url` names the store's register; `bucket_size` bounds the bytes that a reader loads at once.

    A version has `replicas` copies: 1 leaves the weights with the trainers, 2 survive any one process. verl's calls
    `prepare`, `build_topology` and `init_process_group` agree on the number of the next version. Calls raise
    `StoreTimeout` after `timeout` seconds.
    """

    def __init__(
        self, bucket_size: int, url: str, is_master: bool = False, replicas: int = 1, timeout: float = 600.0
    ) -> None:
        self._bucket_size, self._url, self._replicas, self._timeout = bucket_size, url, replicas, timeout
        self._store: WeightStore | None = None
        self._version: int | None = None
        self._part, self._parts = 0, 0

    def prepare(self) -> dict[str, Any]:
        """Open the store; the newest version that this worker knows."""
        return {"latest": self._opened().latest()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[Kwargs, Kwargs]:
        """The next version, and which part of it each trainer publishes; None for rollout workers."""
        version = 1 + max(each["latest"] or 0 for each in metadata)

        def arguments(parts: list[int | None]) -> Kwargs:
            return {"version": [version] * len(parts), "part": parts, "parts": [actor_wg_world_size] * len(parts)}

        return arguments(list(range(actor_wg_world_size))), arguments([None] * rollout_world_size)

    def init_process_group(self, version: int, part: int | None, parts: int) -> None:
        self._version, self._part, self._parts = version, part or 0, parts

    def finalize(self) -> None:
        """Keep the store open: rollout workers may still read the version, and trainers hold it."""
        self._version = None

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Publish this trainer's share: of all tensors, in order, every `parts`-th. All trainers yield all tensors."""
        version, mine, index = self._agreed(), dict[str, torch.Tensor](), 0
        async for name, tensor in _each(weights):
            if index % self._parts == self._part:
                # verl may reuse the memory of a tensor for the next one.
                mine[name] = tensor.detach().to("cpu", copy=True)
            index += 1
        share = {"part": self._part, "parts": self._parts}
        await asyncio.to_thread(self._opened().publish, version, mine, timeout=self._timeout, **share)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the version, `bucket_size` bytes read at a time."""
        version, store = self._agreed(), self._opened()
        await asyncio.to_thread(store.wait, version, self._timeout)
        with store.pin(version):
            for names in await asyncio.to_thread(lambda: list(self._buckets(store, version))):
                loaded = await asyncio.to_thread(store.load, version, names, timeout=self._timeout)
                for name in names:
                    yield name, loaded.pop(name)

    def _buckets(self, store: WeightStore, version: int) -> Iterator[list[str]]:
        names, nbytes = list[str](), 0
        for tensor in store.inspect().content(version).tensors:
            if names and nbytes + tensor.nbytes > self._bucket_size:
                yield names
                names, nbytes = [], 0
            names.append(tensor.name)
            nbytes += tensor.nbytes
        if names:
            yield names

    def _opened(self) -> WeightStore:
        if self._store is None:
            self._store = WeightStore(self._url, replicas=self._replicas, timeout=self._timeout)
        return self._store

    def _agreed(self) -> int:
        if self._version is None:
            raise HoldfastError("no version is agreed on: call init_process_group() first, as verl's manager does")
        return self._version


async def _each(weights: Weights) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterable):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair
