"""The weight store as a checkpoint engine of verl's, from trainers to rollout workers. Its configuration loads it:

    actor_rollout_ref.rollout.checkpoint_engine.backend: holdfast
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module: engine
    actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.holdfast.url: sqlite:////shared/weights.sqlite

Each trainer publishes its share of the tensors, and each rollout worker reads them from the trainers' memory. A worker
that was replaced reads the newest version when it likes: there is no group to rebuild.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from holdfast.store import WeightStore

Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]]
Kwargs = dict[str, list[Any]]


@CheckpointEngineRegistry.register("holdfast")
class HoldfastCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One of a worker. `url` names the store's register; a reader loads about `bucket_size` bytes at once.

    verl's calls `prepare`, `build_topology` and `init_process_group` agree on the number of the next version.
    """

    def __init__(self, bucket_size: int, url: str, is_master: bool = False, timeout: float = 600.0) -> None:
        self._bucket_size = bucket_size
        self._open: dict[str, Any] = {"url": url, "replicas": 1, "timeout": timeout}
        self._store: Any = None  # verl calls `prepare` first

    def prepare(self) -> dict[str, Any]:
        """Open the store, which stays open; the newest version that this worker knows."""
        self._store = self._store or WeightStore(**self._open)
        return {"latest": self._store.latest()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[Kwargs, Kwargs]:
        """The next version, and which part of it each trainer publishes; rollout workers use no part."""
        version = 1 + max(each["latest"] or 0 for each in metadata)

        def arguments(parts: range) -> Kwargs:
            return {"version": [version] * len(parts), "part": [*parts], "parts": [actor_wg_world_size] * len(parts)}

        return arguments(range(actor_wg_world_size)), arguments(range(rollout_world_size))

    def init_process_group(self, version: int, part: int, parts: int) -> None:
        self._version, self._part, self._parts = version, part, parts

    def finalize(self) -> None:
        """Keep the store open: rollout workers may still read the version, and trainers hold it."""

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Publish this trainer's share: of all tensors, in order, every `parts`-th. All trainers yield all tensors."""
        mine, index = dict[str, torch.Tensor](), 0
        async for name, tensor in _each(weights):
            if index % self._parts == self._part:
                mine[name] = tensor.detach().to("cpu", copy=True)  # verl may reuse its memory for the next one
            index += 1
        await asyncio.to_thread(self._store.publish, self._version, mine, part=self._part, parts=self._parts)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the version, `bucket_size` bytes read at a time."""
        version, store = self._version, self._store
        await asyncio.to_thread(store.wait, version)
        with store.pin(version):
            bucket, nbytes = list[str](), 0
            tensors = (await asyncio.to_thread(store.inspect().content, version)).tensors
            for tensor, following in zip(tensors, (*tensors[1:], None), strict=True):
                bucket.append(tensor.name)
                nbytes += tensor.nbytes
                if following is None or nbytes + following.nbytes > self._bucket_size:
                    for found in (await asyncio.to_thread(store.load, version, bucket)).items():
                        yield found
                    bucket, nbytes = [], 0


async def _each(weights: Weights) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterable):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair
