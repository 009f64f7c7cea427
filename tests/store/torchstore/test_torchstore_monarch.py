"""torchstore's interface inside Monarch actors, which find the store without being told of it.

Each test is a driver in a process of its own: Monarch keeps threads and sockets in its process until that ends.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from support.source_tree import TESTS

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        importlib.util.find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[monarch]'"
    ),
]

DRIVER = """
import asyncio, os, sys
import torch
from monarch.actor import shutdown_context, this_host
import holdfast.store.torchstore as ts
from support.samples.torchstore_actors import Worker

def spawn(count, name):
    return this_host().spawn_procs(per_host={{"gpus": count}}).spawn(name, Worker)

async def main():
{body}

asyncio.run(main())
print("done", flush=True)
os._exit(0)
"""


def drive(body: str) -> None:
    """Run `body` in the coroutine of a Monarch driver; fails with the driver's output unless it ends well."""
    program = DRIVER.format(body="\n".join(f"    {line}" for line in body.strip().splitlines()))
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(TESTS), "MONARCH_FILE_LOG": "error", "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0 and found.stdout.endswith("done\n"), found.stdout + found.stderr


def test_actors_of_two_meshes_share_a_store_wherever_they_were_spawned() -> None:
    drive("""
before = spawn(2, "before")
await before.initialized
await ts.initialize(num_storage_volumes=2, strategy=ts.LocalRankStrategy())
after = spawn(2, "after")
await before.put_rank.call()
for point, value in await after.get.call(1):
    assert torch.equal(value, torch.full((5000,), 1))
assert sorted(await ts.keys()) == ["key_0", "key_1"]
assert "not in the store" in await after.slice(gpus=0).why_not.call_one("missing")
await ts.shutdown()
await ts.initialize(num_storage_volumes=2, strategy=ts.LocalRankStrategy())
assert await ts.keys() == []
await after.put_rank.call()
assert torch.equal(await before.slice(gpus=0).get.call_one(1), torch.full((5000,), 1))
await ts.shutdown()
""")


def test_a_store_that_an_actor_owns_is_found_by_its_job() -> None:
    drive("""
workers = spawn(2, "workers")
first, second = workers.slice(gpus=0), workers.slice(gpus=1)
await first.initialize.call_one("theirs")
await second.put.call_one({"step": 7}, "theirs")
assert await first.get.call_one(1, "theirs") == {"step": 7}
assert await ts.get("key_1", store_name="theirs") == {"step": 7}
try:
    await ts.initialize(store_name="theirs")
except RuntimeError as error:
    assert "already initialized" in str(error)
else:
    raise AssertionError("two stores of one name in one job")
await second.shutdown.call_one("theirs")
try:
    await ts.keys(store_name="theirs")
except RuntimeError as error:
    assert "none that this process can find" in str(error)
else:
    raise AssertionError("the store was shut down")
""")
