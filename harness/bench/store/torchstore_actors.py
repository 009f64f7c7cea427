"""The workers of torchstore: actors of Monarch, each in a process of its own, as its users run it.

Run as a program: `torchstore_actors PUBLISHERS READERS FOLDER SHARED`. torchstore and Monarch must be on PYTHONPATH.
Its state dicts go through storage volumes over shared memory, which it chooses by itself on one host.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch

from holdfast.harness.bench.store.data import State
from holdfast.harness.bench.store.drivers import StoreDriver, WorkerPlan
from holdfast.harness.bench.store.worker import StoreWorker, waited
from holdfast.harness.measure.worker import serve

KEY = "weights"
"""Every version is put under this key: what is there already is put fastest."""


class TorchstoreDriver(StoreDriver):
    """torchstore, called in an actor."""

    def __init__(self) -> None:
        self._torchstore: Any = import_module("torchstore")
        self.detail = (
            f"torchstore (source), Monarch {version_of('torchmonarch')}, a storage volume a publisher, shared memory"
        )

    async def publish(self, version: int, state: State) -> None:
        await self._torchstore.put_state_dict(state, KEY, direct_rdma=False)

    async def get(self, version: int, into: State) -> None:
        await self._torchstore.get_state_dict(KEY, user_state_dict=into, direct_rdma=False)

    async def load(self, version: int) -> State:
        found: State = await self._torchstore.get_state_dict(KEY, direct_rdma=False)
        return found


async def _serve(actor: object, role: str, rank: int, folder: str, shared: str) -> None:
    """The endpoint of an actor: be a worker. Its coroutines run in the loop of the actor, calls come in a thread."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.environ["LOCAL_RANK"] = str(rank)
    loop, driver = asyncio.get_running_loop(), TorchstoreDriver()

    def run(call: Awaitable[Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(waited(call), loop).result()

    plan = WorkerPlan(role, rank, Path(folder), Path(shared), 1, "auto")
    address = Path(folder) / "socket"
    await asyncio.to_thread(serve, address, StoreWorker(plan, driver), role, rank, driver.detail, run)


async def _run(publishers: int, readers: int, folder: str, shared: str) -> None:
    torchstore: Any = import_module("torchstore")
    monarch: Any = import_module("monarch.actor")
    kind = type("Worker", (monarch.Actor,), {"serve": monarch.endpoint(_serve)})
    if publishers == 1:
        await torchstore.initialize()
    else:
        await torchstore.initialize(publishers, torchstore.LocalRankStrategy())
    roles = [("publisher", rank) for rank in range(publishers)] + [("reader", rank) for rank in range(readers)]
    meshes = [monarch.this_host().spawn_procs(per_host={"gpus": 1}) for _ in roles]
    workers = [mesh.spawn(f"worker{index}", kind) for index, mesh in enumerate(meshes)]
    await asyncio.gather(
        *(worker.serve.call(*role, folder, shared) for worker, role in zip(workers, roles, strict=True))
    )
    await torchstore.shutdown()


def main() -> None:
    """Start the actors as the command line says; return when all have ended."""
    publishers, readers, folder, shared = sys.argv[1:]
    os.environ.setdefault("HOSTNAME", socket.gethostname())
    asyncio.run(_run(int(publishers), int(readers), folder, shared))


if __name__ == "__main__":
    main()
