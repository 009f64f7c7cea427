"""Tensors between two of Ray's actors: over our memory plane, and by Ray's own ways, in turns; make ray.

show.py [MIB ROUNDS]
"""

import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import tensor_transport
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer

tensor_transport.register()


@ray.remote(enable_tensor_transport=True)
class TensorOwner:
    """Makes tensors, which stay with it, or go to Ray's object store."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)

    def _made(self, value: int) -> dict[str, Any]:
        self.memory.fill_(value)
        return {"a": self.memory[: len(self.memory) // 2], "b": self.memory[len(self.memory) // 2 :], "value": value}

    @ray.method(tensor_transport="holdfast")
    def over_holdfast(self, value: int) -> dict[str, Any]:
        return self._made(value)

    def over_store(self, value: int) -> dict[str, Any]:
        return self._made(value)

    def die(self) -> None:
        os._exit(1)


@ray.remote(enable_tensor_transport=True)
class TensorReader:
    def take(self, made: dict[str, Any]) -> bool:
        value = made["value"]
        return all(int(made[name][0]) == int(made[name][-1]) == value for name in "ab")


def transfers(mebibytes: int, rounds: int) -> None:
    """Print how long it takes until the reader has what the owner has made; then the owner dies."""
    owner, reader = TensorOwner.remote(mebibytes << 20), TensorReader.remote()  # type: ignore[attr-defined]
    ways = {"holdfast": owner.over_holdfast, "object store": owner.over_store}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, method in ways.items():
            made = method.remote(turn)
            ray.wait([made], fetch_local=False)
            began = time.perf_counter()
            assert ray.get(reader.take.remote(made)), way
            times[way].append(time.perf_counter() - began)
    for way, seconds in times.items():
        print(f"{way}: {mebibytes} MiB read in {statistics.median(seconds[1:]) * 1e3:.1f} ms")
    lost = owner.over_holdfast.remote(7)
    ray.wait([lost], fetch_local=False)
    owner.die.remote()
    began = time.perf_counter()
    try:
        ray.get(reader.take.remote(lost), timeout=60)
    except Exception as error:
        assert "RegionGone" in str(error), error
        print(f"the owner died: RegionGone after {time.perf_counter() - began:.2f} s")
    else:
        raise SystemExit("the owner died, and its tensors were read")


def loop(config: dict[str, str]) -> None:
    """What Ray Train runs on each of its workers."""
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert type(backend).__module__.startswith("holdfast."), backend
    if dist.get_rank() == 0:
        Path(config["file"]).write_text(f"a sum of {total.item()} over {type(backend).__name__}")


def train() -> None:
    """A job of Ray Train over our process group."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result"
        trainer = TorchTrainer(
            loop,
            train_loop_config={"file": str(result)},
            torch_config=TorchConfig(backend="holdfast"),
            scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        )
        trainer.fit()
        print("Ray Train, two workers:", result.read_text())


def main(mebibytes: int, rounds: int) -> None:
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        # Before torch 2.14, which does so itself, each process has to register the backend with torch.
        runtime_env={"worker_process_setup_hook": "holdfast.comms.torchdist.register"},
    )
    transfers(mebibytes, rounds)
    train()
    ray.shutdown()


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:] or ("64", "5")))
