"""A torchstore store and its processes: what was put survives its putter, and a reader never sees half a value.

Monarch's actors find the store without being told of it. A driver is a process of its own: Monarch keeps threads and
sockets in its process until that ends.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast.store.torchstore as ts
from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.store.errors import NotInitialized
from holdfast.store.torchstore import home
from holdfast.store.torchstore.client import LocalClient
from support.children import Child, Start
from support.programs.forked_programs import run_python
from support.source_tree import TESTS
from support.waiting import eventually


def a_filler_that_stops(pipe: Connection, nbytes: int) -> None:
    """Take memory of the store as a put does, send where it lies, and wait to be killed."""
    client = asyncio.run(ts.client())
    pipe.send(client._granted(1, nbytes))
    pipe.recv()


def a_caller(pipe: Connection) -> None:
    """Call functions of the interface by name, with arguments from the parent; sends results, or errors as text."""
    while (message := pipe.recv()) is not None:
        name, args, kwargs = message
        try:
            pipe.send(("result", asyncio.run(getattr(ts, name)(*args, **kwargs))))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))


run = asyncio.run
LARGE = 8 << 20


def call(child: Child, name: str, *args: Any, **kwargs: Any) -> Any:
    child.tell((name, args, kwargs))
    kind, value = child.hear()
    assert kind == "result", value
    return value


@pytest.mark.usefixtures("torchstore")
def test_a_reader_gets_one_value_whole_while_its_writers_put_and_are_killed(start: Start) -> None:
    def overwrite(pipe: Connection) -> None:
        async def put_all() -> None:
            for value in count():
                await ts.put("k", torch.full((LARGE,), value % 200 + 1, dtype=torch.uint8))
                if not value:
                    pipe.send("k")

        asyncio.run(put_all())

    writers = [start(overwrite) for _ in range(2)]
    for writer in writers:
        assert writer.hear() == "k"
    target, seen = torch.zeros(LARGE, dtype=torch.uint8), set()
    for turn in range(41):
        if turn == 40:
            for writer in writers:
                writer.kill()
        run(ts.get("k", target))
        low, high = torch.aminmax(target)
        assert low == high, f"bytes of two values: {low} and {high}"
        seen.add(int(low))
    assert len(seen) > 1


@pytest.mark.usefixtures("torchstore")
def test_memory_that_a_dead_process_was_filling_is_used_again(start: Start) -> None:
    run(ts.put("other", torch.zeros(10)))
    filler = start(a_filler_that_stops, LARGE)
    taken = filler.hear()
    filler.kill()

    def taken_again() -> bool:
        again = start(a_filler_that_stops, LARGE)
        where = again.hear()
        again.kill()
        return bool(where == taken)

    eventually(taken_again)


def test_a_process_older_than_the_store_finds_and_ends_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTNAME", "here")
    child = start(a_caller)
    child.tell(("keys", (), {}))
    kind, said = child.hear()
    assert kind == "error" and "NotInitialized" in said
    run(ts.initialize(strategy=ts.HostStrategy()))
    call(child, "put", "k", [1, 2])
    assert run(ts.get("k")) == [1, 2]
    call(child, "shutdown")
    with pytest.raises(NotInitialized):
        run(ts.keys())
    run(ts.initialize())
    assert run(ts.keys()) == [] and call(child, "keys") == []
    run(ts.put("k", torch.ones(3000)))
    assert call(child, "get", "k").sum() == 3000, "both find the new store by the clients that they had"
    run(ts.shutdown())
    run(ts.shutdown())
    child.tell(None)
    child.end()


def test_each_rank_puts_into_its_volume_and_all_get_the_first(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    run(ts.initialize(2, strategy=ts.LocalRankStrategy(ts.TransportType.Gloo)))
    try:
        monkeypatch.setenv("LOCAL_RANK", "1")
        run(ts.put("k", 1))
        monkeypatch.setenv("RANK", "0")
        run(ts.put("k", 0))
        assert run(ts.get("k")) == 1
        monkeypatch.setenv("RANK", "2")
        with pytest.raises(KeyError, match=r"no storage volume '2'"):
            run(ts.put("k", 2))
        monkeypatch.delenv("RANK")
        monkeypatch.delenv("LOCAL_RANK")
        with pytest.raises(KeyError, match="LOCAL_RANK"):
            run(ts.put("k", 3))
        assert run(ts.client()).strategy.default_transport_type is ts.TransportType.Gloo
    finally:
        run(ts.shutdown())


class ByParity(ts.TorchStoreStrategy):
    """A strategy of a user."""

    @classmethod
    def get_client_id(cls) -> str:
        return "even"


def test_a_strategy_of_a_user_is_imported_by_name() -> None:
    run(ts.initialize(2, strategy=ByParity()))
    try:
        run(ts.put("k", 1))
        assert isinstance(run(ts.client()).strategy, ByParity)
    finally:
        run(ts.shutdown())

    class Local(ByParity):
        pass

    with pytest.raises(Mismatch, match="top level of a module"):
        run(ts.initialize(2, strategy=Local()))


def test_a_store_ends_with_the_process_that_owns_it(start: Start) -> None:
    owner = start(a_caller)
    call(owner, "initialize", store_name="theirs")
    call(owner, "put", "k", {"a": 1}, store_name="theirs")
    (found,) = home.running("theirs")
    assert found.owner.pid == owner.pid and home.find("theirs") is None, "a store of a child is not found by its parent"
    client = LocalClient(found)
    assert run(client.get("k")) == {"a": 1}
    owner.kill()
    with pytest.raises(NotInitialized, match="shut down, or its process has ended"):
        run(client.get("k"))
    client.close()
    assert home.resolve("theirs", str(found.folder)) is None
    with pytest.raises(NotInitialized):
        LocalClient(found)
    run(ts.initialize(store_name="theirs"))
    assert not found.folder.exists(), "the next store of the name removes what the killed one left"
    run(ts.shutdown("theirs"))


PROGRAM = """
import asyncio, os
import torch
import holdfast.store.torchstore as ts

async def value(key):
    while not await ts.exists(key):
        await asyncio.sleep(0.01)
    return int((await ts.get(key))[-1])

async def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for turn, strategy in enumerate((ts.LocalRankStrategy, ts.LocalRankStrategy, ts.HostStrategy, ts.HostStrategy)):
        if turn == 2:
            torch.distributed.destroy_process_group()
        await ts.initialize_spmd(strategy=strategy())
        await ts.put(f"rank{rank}", torch.full((2000,), 10 * turn + rank))
        found = [await value(f"rank{other}") for other in range(size)]
        print(f"{rank} {found}\\n", end="", flush=True)  # in one write: torchrun's ranks are not buffered
        await ts.put(f"read{rank}", torch.tensor([1]))
        if rank == 0:  # the store ends with its owner: the others have to be done by then
            assert [await value(f"read{other}") for other in range(size)] == [1] * size
        await ts.shutdown()

torch.distributed.init_process_group("gloo")
asyncio.run(main())
"""


def test_ranks_that_torchrun_starts_share_a_store(tmp_path: Path) -> None:
    """They meet in the store of their group, or without one at the job's master address: twice each."""
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "program.py")
    shown = run_python(*launch, environ=os.environ | {"OMP_NUM_THREADS": "1"})
    found = [f"{rank} {[10 * turn, 10 * turn + 1]}" for rank in range(2) for turn in range(4)]
    assert sorted(shown.splitlines()) == found


def test_the_environment_of_torchrun_is_read_and_several_hosts_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ts.spmd.SPMDEnv(0, 0, 4, 2, "127.0.0.1", 1)
    with pytest.raises(Unsupported, match="over 2 hosts"):
        run(ts.initialize_spmd(strategy=ts.LocalRankStrategy(), env=env))
    with pytest.raises(RuntimeError, match="needs a strategy"):
        run(ts.initialize_spmd(env=env))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"lacks RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR"):
        ts.spmd.SPMDEnv.from_env()
    for name, value in (("RANK", 3), ("LOCAL_RANK", 1), ("WORLD_SIZE", 8), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    env = ts.spmd.SPMDEnv.from_env(master_addr="host", master_port=29600)
    assert env == ts.spmd.SPMDEnv(3, 1, 8, 2, "host", 29600) and (env.num_hosts, env.group_rank) == (4, 1)
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(ValueError, match=r"world_size \(9\) must be divisible"):
        ts.spmd.SPMDEnv.from_env(master_addr="host", master_port=29600)


def test_stores_are_found_while_others_end() -> None:
    """The folder of a store goes at any moment of another one's search."""
    looked = threading.Event()

    def come_and_go() -> None:
        while not looked.is_set():
            with HeldDirectory(home._prefix("passing"), home._ROOT) as folder:
                (folder.path / "1-1").touch()

    passing = threading.Thread(target=come_and_go)
    passing.start()
    try:
        for _ in range(2000):
            assert not list(home.running("passing"))
    finally:
        looked.set()
        passing.join()


# -- in Monarch's actors


DRIVER = """
import asyncio, os
import pytest, torch
from monarch.actor import this_host
import holdfast.store.torchstore as ts
from support.samples.torchstore_actors import Worker

def spawn(count, name):
    return this_host().spawn_procs(per_host={"gpus": count}).spawn(name, Worker)

async def main():
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

    first, second = after.slice(gpus=0), after.slice(gpus=1)
    await first.initialize.call_one("theirs")
    await second.put.call_one({"step": 7}, "theirs")
    assert await first.get.call_one(1, "theirs") == {"step": 7}
    assert await ts.get("key_1", store_name="theirs") == {"step": 7}
    with pytest.raises(RuntimeError, match="already initialized"):
        await ts.initialize(store_name="theirs")
    await second.shutdown.call_one("theirs")
    with pytest.raises(RuntimeError, match="none that this process can find"):
        await ts.keys(store_name="theirs")

asyncio.run(main())
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.thorough
@pytest.mark.skipif(
    importlib.util.find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[monarch]'"
)
def test_actors_share_a_store_of_their_driver_or_of_one_of_them_wherever_they_were_spawned() -> None:
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(TESTS), "MONARCH_FILE_LOG": "error", "OMP_NUM_THREADS": "1"}
    assert run_python("-c", DRIVER, environ=environ, timeout=280.0).endswith("done\n")
