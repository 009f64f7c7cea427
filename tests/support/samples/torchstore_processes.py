"""What child processes do with a torchstore store in tests."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import holdfast.store.torchstore as ts


def a_putter(pipe: Connection, key: str, nbytes: int, value: int) -> None:
    """Put a tensor, send the key, and wait for the end."""
    asyncio.run(ts.put(key, torch.full((nbytes,), value, dtype=torch.uint8)))
    pipe.send(key)
    pipe.recv()


def an_overwriter(pipe: Connection, key: str, nbytes: int) -> None:
    """Overwrite a key with 1, 2, 3, ... until a message comes; sends the number of puts."""
    value = 0

    async def overwrite() -> None:
        nonlocal value
        while not pipe.poll():
            value += 1
            await ts.put(key, torch.full((nbytes,), value % 200 + 1, dtype=torch.uint8))

    asyncio.run(overwrite())
    pipe.send(value)


def a_filler_that_stops(pipe: Connection, nbytes: int) -> None:
    """Take memory of the store as a put does, send where it lies, and wait to be killed."""
    client = asyncio.run(ts.client())
    pipe.send(client._claim(1, nbytes))
    pipe.recv()


def a_caller(pipe: Connection) -> None:
    """Call functions of the interface by name, with arguments from the parent; sends results, or errors as text."""
    while (message := pipe.recv()) is not None:
        name, args, kwargs = message
        try:
            pipe.send(("result", asyncio.run(getattr(ts, name)(*args, **kwargs))))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))


def an_spmd_rank(pipe: Connection, rank: int, size: int, folder: str, strategy: str, turns: int) -> None:
    """Be a rank of a job: put and get over a store of `initialize_spmd`, several times; sends what it got."""
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in job.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    try:
        pipe.send(asyncio.run(_spmd(rank, size, strategy, turns)))
    finally:
        dist.destroy_process_group()


async def _spmd(rank: int, size: int, strategy: str, turns: int) -> list[Any]:
    found: list[Any] = []
    for turn in range(turns):
        await ts.initialize_spmd(strategy=getattr(ts, strategy)())
        found.append(await ts.exists("rank0"))
        dist.barrier()
        await ts.put(f"rank{rank}", torch.full((2000,), 10 * turn + rank))
        dist.barrier()
        found += [int((await ts.get(f"rank{other}"))[-1]) for other in range(size)]
        dist.barrier()
        await ts.shutdown()
    return found
