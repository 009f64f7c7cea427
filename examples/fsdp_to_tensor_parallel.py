"""Two FSDP2 trainers publish their shards; a trainer is killed; two tensor-parallel generators get the version.

python examples/fsdp_to_tensor_parallel.py
"""

import os
import signal
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holdfast.comms import Communicator
from holdfast.harness import LocalCluster, RankFailed
from holdfast.store import WeightStore


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def join(comm: Communicator, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=comm.rank, world_size=comm.size)


def train(comm: Communicator, folder: str, url: str) -> None:
    join(comm, f"{folder}/trainers")
    trained = fully_shard(model(), mesh=init_device_mesh("cpu", (comm.size,)))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with WeightStore(url) as store:
        for version in range(1, 4):
            trained(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            store.publish(version, trained.state_dict())  # each rank gives the shards that it has
        store.wait(3)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def generate(comm: Communicator, folder: str, url: str) -> tuple[int, float]:
    join(comm, f"{folder}/generators")
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    serving = parallelize_module(model(), init_device_mesh("cpu", (comm.size,)), plan)
    with WeightStore(url, hold=False) as store:
        version = store.get("latest", into=serving.state_dict())  # resharded: only what this rank needs is read
    answer = serving(torch.ones(8, 64)).square().mean().item()
    dist.destroy_process_group()
    return version, answer


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/weights.sqlite"
        with WeightStore(url):  # this process keeps replicas too
            try:
                with LocalCluster(2, "shm") as trainers:
                    trainers.run(train, folder, url)
            except RankFailed as death:
                print(f"a trainer is gone: {str(death).splitlines()[0]}")
            with LocalCluster(2, "shm") as generators:
                print("generators serve (version, loss):", generators.run(generate, folder, url))


if __name__ == "__main__":
    main()
