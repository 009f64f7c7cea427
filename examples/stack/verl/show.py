"""verl's CheckpointEngineManager with the engine "holdfast": two trainers, two rollout workers, no GPU; make verl.

The workers stand in for verl's: trainers that yield weights, and rollouts that keep what they get. verl's own classes
carry them, call the engine and register it by `custom_backend_module`.
"""

import logging
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig


def weights(step: int) -> dict[str, torch.Tensor]:
    """The weights after a step, on each of the trainers."""
    draw = torch.Generator().manual_seed(step)
    return {f"layers.{number}.weight": torch.randn(256, 1024, generator=draw) for number in range(32)}


class EngineWorker(Worker):  # type: ignore[misc]
    """What verl's workers do with an engine."""

    def __init__(self, config: CheckpointEngineConfig, master: bool) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module)
        own = config.engine_kwargs[config.backend]
        bucket = config.update_weights_bucket_megabytes << 20
        self.engine = CheckpointEngineRegistry.new(config.backend, bucket_size=bucket, is_master=master, **own)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)


class TrainerWorker(EngineWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int, mode: str) -> dict[str, Any]:
        await self.engine.send_weights(iter(weights(global_steps).items()), global_steps=global_steps)
        return {}


class RolloutWorker(EngineWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int) -> None:
        received = self.engine.receive_weights(global_steps=global_steps)
        self.served = {name: tensor async for name, tensor in received}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def serves(self, step: int) -> bool:
        wanted = weights(step)
        return self.served.keys() == wanted.keys() and all(
            torch.equal(self.served[name], wanted[name]) for name in wanted
        )


class RolloutReplica(SimpleNamespace):
    """A rollout replica, as the manager sees it: its workers, and calls that pause and resume it."""

    async def _nothing(self, **_: Any) -> None: ...

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = _nothing


def group(kind: type[EngineWorker], config: CheckpointEngineConfig, size: int) -> RayWorkerGroup:
    made = RayClassWithInitArgs(cls=ray.remote(kind), config=config, master=False)
    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    with tempfile.TemporaryDirectory() as directory:
        config = CheckpointEngineConfig(
            backend="holdfast",
            custom_backend_module="engine",
            update_weights_bucket_megabytes=4,
            engine_kwargs={"holdfast": {"url": f"sqlite://{directory}/weights.sqlite"}},
        )
        trainers, rollouts = group(TrainerWorker, config, 2), group(RolloutWorker, config, 2)
        replicas = [RolloutReplica(workers=[worker]) for worker in rollouts.workers]
        manager = CheckpointEngineManager(config, trainers, replicas)
        for step in (1, 2, 2):  # a step that is done again has a version of its own
            began = time.perf_counter()
            manager.update_weights(global_steps=step)
            seconds = time.perf_counter() - began
            served = rollouts.serves(step)
            print(f"step {step}: 32 MiB to {len(served)} rollout workers in {seconds:.2f} s; equal: {served}")
            assert served == [True, True]
        ray.shutdown()


if __name__ == "__main__":
    main()
