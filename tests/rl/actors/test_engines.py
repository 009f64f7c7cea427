"""What every engine does: it starts actors, calls them, and tells of each end at once, however it comes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.comms.transport.liveness import is_stopped
from holdfast.ft.event_lines import to_record
from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.rl.actors.engine import STOPPED, Engine, current_engine
from holdfast.rl.actors.errors import (
    ActorDied,
    ActorStartFailed,
    EndpointFailed,
    EndpointTimeout,
    NoEngine,
    NoSuchEndpoint,
)
from support.rl.event_loop import until
from support.rl.started_monarch import start_monarch_once
from support.samples.actors import Counter, Hoarder, Stillborn
from support.source_tree import ROOT, TESTS
from support.waiting import becomes_true

MakeEngine = Callable[..., Engine]
SOON = 30.0
"""Seconds in which a busy machine does what takes milliseconds."""


async def test_methods_are_called_in_a_process_of_their_own(make_engine: MakeEngine, tmp_path: Path) -> None:
    """It is a fork of the one zygote, and has a file for its output."""
    async with make_engine(logs=tmp_path) as engine:
        assert current_engine() is engine
        counter = await engine.start("counter", Counter, 5, environ={"COLOUR": "red"})
        assert await counter.call("add", n=2) == 7
        assert await counter.call("who") == counter.pid != os.getpid()
        assert await counter.call("variable", "COLOUR") == "red"
        assert (counter.name, counter.host, counter.alive) == ("counter", "", True)
        parent = int(Path(f"/proc/{counter.pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent == zygote_pid()
    assert (tmp_path / "counter.log").exists()
    with pytest.raises(NoEngine, match="async with"):
        current_engine()


async def test_files_of_an_actor_are_removed_after_it_was_killed(make_engine: MakeEngine, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    async with make_engine() as engine:
        hoarder = await engine.start("hoarder", Hoarder, str(outside))
        assert outside.exists()
        hoarder.kill()
    assert not outside.exists()


async def test_sync_methods_run_one_at_a_time_and_async_ones_beside_them(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        counter = await engine.start("counter", Counter)
        blocked = asyncio.create_task(counter.call("block", 2.0))
        adding = [asyncio.create_task(counter.call("add")) for _ in range(20)]
        sleeping = [counter.call("echo", i, 0.2) for i in range(20)]
        assert await asyncio.gather(*sleeping) == list(range(20))  # in turn they would take 4 s
        await counter.ping(SOON)
        assert not blocked.done() and not any(each.done() for each in adding)
        assert await blocked == 2.0
        assert sorted(await asyncio.gather(*adding)) == list(range(1, 21))


async def test_a_method_that_raises_or_hangs_harms_nothing_else(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        counter = await engine.start("counter", Counter)
        for error in (ValueError("17"), SystemExit(3), KeyboardInterrupt()):
            with pytest.raises(EndpointFailed, match=r"counter failed in fail") as caught:
                await counter.call("fail", error)
            assert type(caught.value.__cause__) is type(error)
            assert "in fail" in caught.value.trace
        with pytest.raises(EndpointFailed, match="pickle"):
            await counter.call("lock")
        for missing in ("subtract", "_log", "value"):
            with pytest.raises(NoSuchEndpoint, match="it has: add"):
                await counter.call(missing)
        with pytest.raises(EndpointTimeout, match=r"did not answer echo within 0.1 s"):
            await counter.call("echo", 1, 60.0, timeout=0.1)
        assert await counter.call("add") == 1


@pytest.mark.parametrize(("how", "words"), [("raise", "no such model"), ("die", "SIGKILL")])
async def test_an_actor_that_cannot_be_made_is_an_error_at_its_start(
    make_engine: MakeEngine, how: str, words: str
) -> None:
    told: list[str] = []
    async with make_engine() as engine:
        with pytest.raises(ActorStartFailed, match=words):
            await engine.start("stillborn", Stillborn, how, on_exit=told.append)
    assert told == []


async def test_an_interpreter_that_dies_before_its_actor_is_made_leaves_its_last_words(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        environ = {"PYTHONPATH": str(TESTS)}
        with pytest.raises(ActorStartFailed, match=r"SIGKILL; the end of its output:\n(?s:.*)no such device"):
            await engine.start("stillborn", Stillborn, "die", environ=environ, python=sys.executable)


async def test_a_kill_fails_all_calls_in_flight_at_once_and_is_told_once(make_engine: MakeEngine) -> None:
    told: list[str] = []
    async with make_engine() as engine:
        counter = await engine.start("counter", Counter, on_exit=told.append)
        flying = [asyncio.create_task(counter.call("echo", i, 60.0)) for i in range(5)]
        flying.append(asyncio.create_task(counter.call("block", 60.0)))
        await counter.ping(SOON)
        os.kill(counter.pid, signal.SIGKILL)
        for each in await asyncio.gather(*flying, return_exceptions=True):
            assert isinstance(each, ActorDied) and "SIGKILL" in each.how
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(ActorDied, match=f"pid {counter.pid}"):
                await counter.call("add")
        assert time.monotonic() - began < SOON
        assert not counter.alive and len(told) == 1 and "SIGKILL" in told[0]
    assert len(told) == 1


async def test_an_exit_is_told_with_its_status(make_engine: MakeEngine) -> None:
    told: list[str] = []
    async with make_engine() as engine:
        counter = await engine.start("counter", Counter, on_exit=told.append)
        with pytest.raises(ActorDied, match="status 3"):
            await counter.call("leave", 3)
    assert len(told) == 1 and "status 3" in told[0]


async def test_a_stopped_process_answers_no_ping_and_can_be_ended(make_engine: MakeEngine) -> None:
    told: list[str] = []
    async with make_engine() as engine:
        counter = await engine.start("counter", Counter, on_exit=told.append)
        os.kill(counter.pid, signal.SIGSTOP)
        await until(lambda: is_stopped(counter.pid))  # its threads may run on for a moment
        with pytest.raises(EndpointTimeout):
            await counter.ping(0.3)
        await counter.stop(timeout=0.2)
    assert told == [STOPPED]


async def test_stops_call_close_once_and_are_told_as_such(make_engine: MakeEngine, tmp_path: Path) -> None:
    told: list[str] = []
    note = tmp_path / "note"
    async with make_engine() as engine:
        counter = await engine.start("counter", Counter, 0, str(note), on_exit=told.append)
        await asyncio.gather(counter.stop(), counter.stop())
        await counter.stop()
        assert note.read_text() == "closed" and told == [STOPPED]
        other = await engine.start("other", Counter, 0, str(note), on_exit=told.append)
        note.unlink()
    assert note.read_text() == "closed" and told == [STOPPED] * 2 and not other.alive


async def test_another_interpreter_may_run_the_actor(make_engine: MakeEngine, tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nOTHER=yes exec {sys.executable} "$@"\n')
    other.chmod(0o700)
    async with make_engine() as engine:
        environ = {"PYTHONPATH": str(TESTS)}
        counter = await engine.start("counter", Counter, 5, environ=environ, python=str(other))
        assert await counter.call("add") == 6
        assert await counter.call("variable", "OTHER") == "yes"
        counter.kill()
        with pytest.raises(ActorDied):
            while True:
                await counter.call("add")
        with pytest.raises(ActorStartFailed, match="nowhere"):
            await engine.start("counter", Counter, python="/nowhere/python")


async def test_many_starts_and_kills_leave_no_descriptor(make_engine: MakeEngine) -> None:
    """Monarch may close its pipe to a process that has ended a moment later."""

    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with make_engine() as engine:
        most = 0
        for n in range(8):
            counters = await asyncio.gather(*[engine.start(f"counter-{n}-{i}", Counter) for i in range(2)])
            counters[0].kill()
            await asyncio.gather(*[each.stop() for each in counters])
            if n < 4:
                most = max(most, count())
            async with asyncio.timeout(SOON):
                while count() > most:
                    await asyncio.sleep(0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_stop_by_monarch_that_takes_too_long_leaves_no_task(seconds: float) -> None:
    start_monarch_once()
    from monarch._src.actor.returns_future import returns_future

    from holdfast.rl.actors.monarch import stop_procs

    class Procs:
        @returns_future
        async def stop(self) -> None:
            await asyncio.Event().wait()

    async def body() -> None:
        await stop_procs(Procs(), seconds)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(body())


@pytest.mark.timeout(200)
@pytest.mark.skipif(importlib.util.find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'")
def test_an_actor_with_a_session_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    """The members of a job are Monarch actors, as in the example."""
    contract = LocalContract("job", tmp_path, "shm", 3).made()
    environ = {**os.environ, **contract.environ(), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(ROOT / "examples" / "stack" / "monarch" / "sessions.py"), "3", "250"]

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in map(to_record, contract.events()) if event["kind"] == kind]

    driver = subprocess.Popen(program, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        began = becomes_true(lambda: len(events("committed")) > 9, 90.0, interval=0.05)
        assert began, "no steps are done"
        victim = next(event["pid"] for event in events("rebuilt") if event["rank"] == 1)
        os.kill(victim, signal.SIGKILL)
        words, _ = driver.communicate(timeout=90.0)
    finally:
        driver.kill()
        driver.communicate(timeout=90.0)
    assert driver.returncode == 0, words
    ends = [line for line in words.splitlines() if line.startswith(("lost", "rank"))]
    epoch = events("rebuilt")[-1]["epoch"]
    assert [line.split(":")[0] for line in ends] == ["lost"] + [
        f"rank {rank} of 2 finished in epoch {epoch}" for rank in range(2)
    ], words
    built = {event["epoch"]: event["size"] for event in events("rebuilt")}
    assert [size for _, size in sorted(built.items())] == [3, 2]
