"""After the loss of a holder, the copies of versions are counted without it, and it alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import CopiesRestored, Event, ProcessLost
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.run.weight_holder import CopiesWatch
from holdfast.store import WeightStore
from support.waiting import PATIENCE, next_line

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
HOLDER = """
import os, sys, torch
from holdfast.comms.transport.liveness import this_host
from holdfast.store import WeightStore
store = WeightStore(sys.argv[1], replicas=1)
if sys.argv[2] == "publish":
    store.publish(1, {"w": torch.ones(4)})
print(os.getpid(), this_host(), flush=True)
sys.stdin.read()
"""


def separate() -> bool:
    """Whether processes can be started in a namespace of pids of their own."""
    return shutil.which("unshare") is not None and subprocess.run([*UNSHARE, "true"], check=False).returncode == 0


@contextlib.contextmanager
def holder(url: str, what: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A holder in a namespace of pids, so that it is on a host of its own. Yields its pid, and `this_host` there."""
    command = [*UNSHARE, sys.executable, "-c", HOLDER, url, what]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        pid, host = next_line(process.stdout).split()
        yield process, int(pid), host
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


@pytest.mark.timeout(120)
@pytest.mark.skipif(not separate(), reason="namespaces of pids take unshare, and root")
def test_a_holder_of_another_host_with_the_same_pid_is_not_taken_for_the_lost_one(tmp_path: Path) -> None:
    url, told = f"sqlite://{tmp_path / 'register'}", list[Event]()
    with (
        holder(url, "publish") as (_, kept, other),
        holder(url, "hold") as (victim, pid, host),
        WeightStore(url, hold=False) as store,
        RunDirectory(tmp_path / "run").open() as directory,
    ):
        assert kept == pid and host != other and pid != os.getpid()
        assert [(each.pid, each.peer.host) for each in store.holders(1)] == [(kept, other)]
        telemetry = RunTelemetry(directory, (told.append,))
        watch = CopiesWatch(store, 1, telemetry, {"tcp://lost:1": host}.__getitem__)

        async def body() -> None:
            async with asyncio.timeout(30.0), watch.watching():
                victim.kill()
                lost = ProcessLost(time=0.0, name="holder-1", role="holder", host="tcp://lost:1", pid=pid, how="killed")
                telemetry.emit(lost)
                while not any(isinstance(each, CopiesRestored) for each in told):
                    await asyncio.sleep(0.01)

        asyncio.run(body())
        [restored] = [each for each in told if isinstance(each, CopiesRestored)]
        assert restored.versions == 1, "the copy of the other holder counts"
