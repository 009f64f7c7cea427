"""Reads and writes between two Monarch actors: a memory plane beside Monarch's RDMABuffer, in turns in one run.

    python examples/stack/monarch/rdma.py [MIB ROUNDS]

Without RDMA hardware Monarch's falls back to TCP. Every transfer is checked.
"""

import asyncio
import os
import statistics
import sys
import time
import warnings
from typing import Any

os.environ.setdefault("MONARCH_FILE_LOG", "error")
os.environ["PYTHONPATH"] = f"{sys.path[0]}:{os.environ.get('PYTHONPATH', '')}"  # Monarch's processes import it too

import monarch
import torch
from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer as MonarchBuffer
from plane_buffer import PlaneBuffer

KINDS = {"holdfast": PlaneBuffer, "Monarch over TCP": MonarchBuffer}


def configure() -> None:
    warnings.simplefilter("ignore")
    monarch.configure(rdma_allow_tcp_fallback=True)


class BufferOwner(Actor):
    """Has the memory, and hands out buffers over it."""

    def __init__(self, nbytes: int) -> None:
        configure()
        self.memory = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        self.buffers: dict[str, Any] = {}

    @endpoint
    async def buffer(self, kind: str) -> Any:
        self.buffers[kind] = KINDS[kind](self.memory)
        return self.buffers[kind]

    @endpoint
    async def holds(self, value: int) -> bool:
        return bool((self.memory == value).all())

    @endpoint
    async def drop(self, kind: str) -> None:
        await self.buffers.pop(kind).drop()


class BufferReader(Actor):
    """Another process, which reads and writes that memory."""

    def __init__(self, nbytes: int) -> None:
        configure()
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)

    @endpoint
    async def read(self, buffer: Any) -> tuple[float, int]:
        self.memory.zero_()
        began = time.perf_counter()
        await buffer.read_into(self.memory)
        return time.perf_counter() - began, int(self.memory[-1])

    @endpoint
    async def write(self, buffer: Any, value: int) -> float:
        self.memory.fill_(value)
        began = time.perf_counter()
        await buffer.write_from(self.memory)
        return time.perf_counter() - began


async def main(nbytes: int, rounds: int) -> None:
    configure()
    owner, reader = (
        this_host().spawn_procs(per_host={"gpus": 1}).spawn(name, kind, nbytes)
        for name, kind in (("owner", BufferOwner), ("reader", BufferReader))
    )
    buffers = {kind: await owner.buffer.call_one(kind) for kind in KINDS}
    times: dict[tuple[str, str], list[float]] = {(kind, way): [] for kind in KINDS for way in ("read", "write")}
    value = (nbytes - 1) % 256
    for turn in range(rounds + 1):
        for kind, buffer in buffers.items():
            seconds, last = await reader.read.call_one(buffer)
            assert last == value, f"{kind} read {last}, not {value}"
            times[kind, "read"].append(seconds)
            value = (7 * turn + len(kind)) % 256
            times[kind, "write"].append(await reader.write.call_one(buffer, value))
            assert await owner.holds.call_one(value), f"{kind} did not write {value}"
    rates = {key: nbytes / statistics.median(found[1:]) / 1e9 for key, found in times.items()}
    for way in ("read", "write"):
        ours, theirs = (rates[kind, way] for kind in KINDS)
        print(f"{way} {nbytes >> 20} MiB: {ours:.2f} GB/s, Monarch over TCP {theirs:.2f}: {ours / theirs:.1f} times")
        assert ours > theirs
    for kind in KINDS:
        await owner.drop.call_one(kind)
    try:
        await reader.read.call_one(buffers["holdfast"])
    except Exception as error:
        print("after drop:", error)
        assert "RegionGone" in str(error)
    else:
        raise AssertionError("a dropped buffer was read")


if __name__ == "__main__":
    mebibytes, rounds = map(int, sys.argv[1:] or ("64", "5"))
    asyncio.run(main(mebibytes << 20, rounds))
    sys.stdout.flush()
    os._exit(0)
