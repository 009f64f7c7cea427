"""Engines start actors and tell of each end at once; calls of services outlive replicas, which come back."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import cloudpickle
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.transport.liveness import is_stopped
from holdfast.ft.event_lines import to_record
from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.ft.registers import RegisterAway
from holdfast.ft.registers.etcd import OtherCluster
from holdfast.rl.actors import errors
from holdfast.rl.actors.engine import STOPPED, Engine, LocalEngine, current_engine, endpoint
from holdfast.rl.actors.service import (
    ReplicaEvent,
    ReplicaStatus,
    Servable,
    Service,
    ServiceOptions,
    ServiceReplica,
    ServiceStatus,
    choose,
)
from holdfast.rl.generators.errors import GenerationTimeout, VersionGone
from holdfast.rl.run.services import service_metrics
from holdfast.store import StoreTimeout
from support.event_loop import start_monarch_once, until
from support.samples.actors import Counter, Hoarder, Late, Stillborn
from support.source_tree import ROOT, TESTS
from support.waiting import PATIENCE, PROGRAM_SECONDS, becomes_true

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
        assert psutil.Process(counter.pid).ppid() == zygote_pid()
    assert (tmp_path / "counter.log").exists()
    with pytest.raises(errors.NoEngine, match="async with"):
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
            with pytest.raises(errors.EndpointFailed, match=r"counter failed in fail") as caught:
                await counter.call("fail", error)
            assert type(caught.value.__cause__) is type(error)
            assert "in fail" in caught.value.trace
        with pytest.raises(errors.EndpointFailed, match="pickle"):
            await counter.call("lock")
        for missing in ("subtract", "_log", "value"):
            with pytest.raises(errors.NoSuchEndpoint, match="it has: add"):
                await counter.call(missing)
        with pytest.raises(errors.EndpointTimeout, match=r"did not answer echo within 0.1 s"):
            await counter.call("echo", 1, 60.0, timeout=0.1)
        assert await counter.call("add") == 1


ANOTHER_PYTHON = {"environ": {"PYTHONPATH": str(TESTS)}, "python": sys.executable}


@pytest.mark.parametrize(
    ("how", "options", "words"),
    [
        ("raise", {}, "no such model"),
        ("die", {}, "SIGKILL"),
        ("die", ANOTHER_PYTHON, r"SIGKILL; the end of its output:\n(?s:.*)no such device"),
        ("die", {"python": "/nowhere/python"}, "nowhere"),
    ],
)
async def test_an_actor_that_cannot_be_made_is_an_error_at_its_start(
    make_engine: MakeEngine, how: str, options: dict[str, Any], words: str
) -> None:
    told: list[str] = []
    async with make_engine() as engine:
        with pytest.raises(errors.ActorStartFailed, match=words):
            await engine.start("stillborn", Stillborn, how, on_exit=told.append, **options)
    assert told == []


async def test_an_end_fails_all_calls_in_flight_at_once_and_is_told_once(make_engine: MakeEngine) -> None:
    told: list[str] = []
    async with make_engine() as engine:
        counter = await engine.start("counter", Counter, on_exit=told.append)
        flying = [asyncio.create_task(counter.call("echo", i, 60.0)) for i in range(5)]
        flying.append(asyncio.create_task(counter.call("block", 60.0)))
        await counter.ping(SOON)
        os.kill(counter.pid, signal.SIGKILL)
        for each in await asyncio.gather(*flying, return_exceptions=True):
            assert isinstance(each, errors.ActorDied) and "SIGKILL" in each.how
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(errors.ActorDied, match=f"pid {counter.pid}"):
                await counter.call("add")
        assert time.monotonic() - began < SOON
        assert not counter.alive and len(told) == 1 and "SIGKILL" in told[0]
        leaving = await engine.start("leaving", Counter, on_exit=told.append)
        with pytest.raises(errors.ActorDied, match="status 3"):
            await leaving.call("leave", 3)
    assert len(told) == 2 and "status 3" in told[1]


async def test_a_stopped_process_answers_no_ping_and_can_be_ended(make_engine: MakeEngine) -> None:
    told: list[str] = []
    async with make_engine() as engine:
        counter = await engine.start("counter", Counter, on_exit=told.append)
        os.kill(counter.pid, signal.SIGSTOP)
        await until(lambda: is_stopped(counter.pid))  # its threads may run on for a moment
        with pytest.raises(errors.EndpointTimeout):
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
        counter = await engine.start("counter", Counter, 5, **ANOTHER_PYTHON | {"python": str(other)})
        assert await counter.call("add") == 6
        assert await counter.call("variable", "OTHER") == "yes"
        counter.kill()
        with pytest.raises(errors.ActorDied):
            while True:
                await counter.call("add")


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


@pytest.mark.thorough
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
        began = becomes_true(lambda: len(events("committed")) > 9, interval=0.05)
        assert began, "no steps are done"
        victim = next(event["pid"] for event in events("rebuilt") if event["rank"] == 1)
        os.kill(victim, signal.SIGKILL)
        words, _ = driver.communicate(timeout=PROGRAM_SECONDS)
    finally:
        driver.kill()
        driver.communicate(timeout=PROGRAM_SECONDS)
    assert driver.returncode == 0, words
    ends = [line for line in words.splitlines() if line.startswith(("lost", "rank"))]
    epoch = events("rebuilt")[-1]["epoch"]
    assert [line.split(":")[0] for line in ends] == ["lost"] + [
        f"rank {rank} of 2 finished in epoch {epoch}" for rank in range(2)
    ], words
    built = {event["epoch"]: event["size"] for event in events("rebuilt")}
    assert [size for _, size in sorted(built.items())] == [3, 2]


# -- services


class Policy(Servable):
    """An actor that serves a version."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    @endpoint(idempotent=True)
    async def generate(self, prompt: str, seconds: float = 0.0) -> tuple[str, int, int]:
        """The prompt, the version, the process."""
        await asyncio.sleep(seconds)
        return prompt.upper(), self.version, os.getpid()

    async def pay(self, seconds: float) -> int:
        """What must not be done twice."""
        await asyncio.sleep(seconds)
        return os.getpid()

    async def load(self, version: int) -> None:
        if version < 0:
            raise ValueError(f"version {version} cannot be loaded")
        self.version = version

    @endpoint(idempotent=True)
    async def misbehave(self, how: str, mark: str, times: int) -> int:
        """Die, hang or time out, so many times in all processes together, each noted in the file `mark`."""
        with Path(mark).open("a+") as marks:
            marks.seek(0)
            if len(marks.read().split()) >= times:
                return os.getpid()
            marks.write(f"{os.getpid()} ")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            await asyncio.sleep(600.0)
        raise GenerationTimeout(1.0, 4)


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no replica has to import all that this file does


def pids(service: Service) -> list[int]:
    return [each.pid for each in service.status().replicas if each.health == "ready"]


async def test_a_call_goes_to_the_least_loaded_replica(make_engine: MakeEngine) -> None:
    async with make_engine(), await Policy.options(num_replicas=2).as_service(7) as policy:
        answers = await asyncio.gather(*[policy.generate.route(f"p{i}", 0.05) for i in range(20)])
        assert [each[:2] for each in answers] == [(f"P{i}", 7) for i in range(20)]
        assert sorted(map([each[2] for each in answers].count, pids(policy))) == [10, 10]
        slow = asyncio.create_task(policy.generate.route("slow", 5.0))
        await until(lambda: any(each.load for each in policy.status().replicas))
        quick = {(await policy.generate.route("quick"))[2] for _ in range(10)}
        assert len(quick) == 1 and (await slow)[2] not in quick
        with pytest.raises(errors.NoSuchEndpoint, match="generate"):
            _ = policy.generates


async def test_a_killed_replica_costs_no_call_and_comes_back(make_engine: MakeEngine) -> None:
    events: list[ReplicaEvent] = []
    options = Policy.options(num_replicas=2, observer=events.append)
    async with make_engine(), await options.as_service() as policy:
        before = pids(policy)
        flying = [asyncio.create_task(policy.generate.route(f"p{i}", 0.5)) for i in range(8)]
        await until(lambda: all(each.load for each in policy.status().replicas))
        os.kill(before[0], signal.SIGKILL)
        answers = await asyncio.gather(*flying)
        assert [each[0] for each in answers] == [f"P{i}" for i in range(8)]
        assert before[0] not in {each[2] for each in answers}
        await until(lambda: len(pids(policy)) == 2)
        status = policy.status()
        assert (status.lost, status.retried, [each.restarts for each in status.replicas]) == (1, 4, [1, 0])
        kinds = [each.kind for each in events]
        assert [kind for kind in kinds if kind != "took_over"] == ["ready", "ready", "lost", "ready"]
        assert kinds.count("took_over") == 4, "each call that was lost is answered by the other replica"
        assert "SIGKILL" in events[2].detail


async def test_a_call_that_may_not_be_repeated_raises(make_engine: MakeEngine) -> None:
    async with make_engine(), await Policy.options(num_replicas=2).as_service() as policy:
        paying = asyncio.create_task(policy.pay.route(60.0))
        await until(lambda: any(each.load for each in policy.status().replicas))
        (victim,) = [each for each in policy.status().replicas if each.load]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(errors.ReplicaLost, match="not declared idempotent") as caught:
            await paying
        assert caught.value.replica == victim.name and caught.value.tries == 1


async def test_a_call_that_ends_its_replicas_is_not_tried_for_ever(make_engine: MakeEngine, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    options = Policy.options(num_replicas=2, tries=3)
    async with make_engine(), await options.as_service() as policy:
        with pytest.raises(errors.ReplicaLost, match="after 3 tries"):
            await policy.misbehave.route("die", str(marks), 100)
        assert len(set(marks.read_text().split())) == 3
        assert (await policy.generate.route("still"))[0] == "STILL"


async def test_a_stopped_replica_is_killed_and_replaced(make_engine: MakeEngine) -> None:
    events: list[ReplicaEvent] = []
    options = Policy.options(num_replicas=2, heartbeat=0.1, silence=600.0, observer=events.append)
    async with make_engine(), await options.as_service() as policy:
        victim = pids(policy)[0]
        os.kill(victim, signal.SIGSTOP)
        answers = await asyncio.gather(*[policy.generate.route("x") for _ in range(8)])
        assert victim not in {each[2] for each in answers}
        await until(lambda: len(pids(policy)) == 2)
        assert "is stopped" in next(each.detail for each in events if each.kind == "lost")


async def test_a_call_that_hangs_goes_elsewhere_at_its_deadline(make_engine: MakeEngine, tmp_path: Path) -> None:
    async with make_engine(), await Policy.options(num_replicas=2, deadline=1.0).as_service() as policy:
        before = pids(policy)
        survivor = await policy.misbehave.route("hang", str(tmp_path / "hung"), 1)
        assert survivor in before and policy.status().lost == 1
        await until(lambda: len(pids(policy)) == 2)


async def test_an_error_costs_no_replica_and_one_that_passes_is_tried_elsewhere(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    async with make_engine(), await Policy.options(num_replicas=2, tries=4).as_service() as policy:
        answered = await policy.misbehave.route("time out", str(tmp_path / "once"), 1)
        assert answered != int((tmp_path / "once").read_text())
        await policy.misbehave.route("time out", str(tmp_path / "three"), 3)
        first, second, _ = map(int, (tmp_path / "three").read_text().split())
        assert first != second, "the other replica is asked before the same one again"
        with pytest.raises(errors.EndpointFailed, match="were not drawn"):
            await policy.misbehave.route("time out", str(tmp_path / "always"), 100)
        assert len((tmp_path / "always").read_text().split()) == 4
        with pytest.raises(errors.EndpointFailed, match="cannot be loaded") as caught:
            await policy.load.route(-1)
        assert isinstance(caught.value.__cause__, ValueError)
        assert (policy.status().lost, policy.status().retried) == (0, 7)


async def test_a_fanout_has_a_result_or_an_error_of_each_replica(make_engine: MakeEngine) -> None:
    async with make_engine(), await Policy.options(num_replicas=3).as_service() as policy:
        found = await policy.pay.fanout(0.0)
        assert [each.get() for each in found] == pids(policy)
        paying = asyncio.create_task(policy.pay.fanout(3.0))
        await until(lambda: all(each.load for each in policy.status().replicas))
        os.kill(pids(policy)[1], signal.SIGKILL)
        first, second, third = await paying
        assert first.error is None and third.error is None
        assert isinstance(second.error, errors.ReplicaLost) and "SIGKILL" in second.error.why
        with pytest.raises(errors.ReplicaLost):
            second.get()
        assert all(
            isinstance(each.error, errors.EndpointFailed | errors.ReplicaLost) for each in await policy.load.fanout(-1)
        )


async def test_a_session_stays_with_one_replica_and_ends_with_it(make_engine: MakeEngine) -> None:
    async with make_engine(), await Policy.options(num_replicas=2).as_service() as policy:
        async with policy.session() as one, policy.session() as other:
            mine = {(await one.generate("x"))[2] for _ in range(5)}
            assert len(mine) == 1 and (await other.generate("x"))[2] not in mine
            assert [each.load for each in policy.status().replicas] == [1, 1]
            os.kill(mine.pop(), signal.SIGKILL)
            with pytest.raises(errors.ReplicaLost, match="begin another session"):
                while True:
                    await one.generate("x", 0.05)
            assert (await other.generate("y"))[0] == "Y"
        assert sum(each.load for each in policy.status().replicas) == 0


async def test_a_replica_is_prepared_before_it_serves_and_replaced_when_asked(make_engine: MakeEngine) -> None:
    """Prepared is also one that takes the place of another; and one that cannot be prepared is no replica."""
    prepared: list[str] = []

    async def prepare(replica: ServiceReplica) -> None:
        prepared.append(replica.name)
        await replica.call("load", -1 if replica.name == "policy-0.1" else 5)

    async with make_engine(), await Policy.options(num_replicas=2, prepare=prepare).as_service() as policy:
        policy.replace("policy-0", "its weights are too old")
        policy.replace("policy-7", "there is none")
        await until(lambda: len(pids(policy)) == 2)
        assert [each.get()[1] for each in await policy.generate.fanout("x")] == [5, 5]
        assert sorted(prepared) == ["policy-0", "policy-0.1", "policy-0.2", "policy-1"]
        assert [each.name for each in policy.status().replicas] == ["policy-0.2", "policy-1"]
        assert policy.status().lost == 1


async def test_a_replica_that_never_starts_fails_the_service(make_engine: MakeEngine) -> None:
    events: list[ReplicaEvent] = []
    async with make_engine() as engine:
        options = ServiceOptions(Stillborn, num_replicas=2, start_failures=3, engine=engine, observer=events.append)
        with pytest.raises(errors.ServiceFailed, match="3 times in a row"):
            await options.as_service("die")
    assert {each.kind for each in events} == {"start_failed"}


@pytest.mark.parametrize("kind", ["ready", "start_failed", "lost"])
async def test_an_error_of_the_observer_ends_the_service(kind: str) -> None:
    """Such as that of a run whose directory takes no more events."""

    def observe(event: ReplicaEvent) -> None:
        if event.kind == kind:
            raise RuntimeError("no room on the disk")

    async with LocalEngine():
        actor, arguments = (Stillborn, ("die",)) if kind == "start_failed" else (Policy, ())
        with pytest.raises(errors.ServiceFailed, match="no room on the disk"):
            async with await ServiceOptions(actor, observer=observe).as_service(*arguments) as policy:
                os.kill(policy.status().replicas[0].pid, signal.SIGKILL)
                while True:
                    policy.check()
                    await asyncio.sleep(0.01)


async def test_a_start_that_fails_for_a_reason_that_passes_is_not_counted(tmp_path: Path) -> None:
    events: list[ReplicaEvent] = []

    def hear(event: ReplicaEvent) -> None:
        events.append(event)
        if len(events) == 3:
            (tmp_path / "here").touch()

    async with LocalEngine():
        options = ServiceOptions(Late, start_failures=1, observer=hear)
        async with await options.as_service(str(tmp_path / "here")) as late:
            [replica] = late.status().replicas
    assert [(each.kind, each.passing) for each in events] == [("start_failed", True)] * 3 + [("ready", False)]
    ready = events[-1]
    assert (ready.replica.pid, ready.replica.host) == (replica.pid, "") and ready.seconds > 0


async def test_a_replica_that_a_fanout_does_not_wait_for_has_an_error_and_stays() -> None:
    async with LocalEngine(), await ServiceOptions(Counter, num_replicas=2).as_service() as counter:
        late = await counter.hang.options(patience=0.05).fanout()
        assert [str(each.error) for each in late] == [f"hang: counter-{n}: no answer in 0.05 s" for n in range(2)]
        who = await counter.who.options(patience=PATIENCE).fanout()
        assert [each.value for each in who] == pids(counter)
        assert counter.status().lost == 0
        assert [each.load for each in counter.status().replicas] == [0, 0]


async def test_a_full_queue_refuses_instead_of_growing(make_engine: MakeEngine) -> None:
    options = Policy.options(num_replicas=1, concurrency=2, queue=3, timeout=30.0)
    async with make_engine(), await options.as_service() as policy:
        flying = [asyncio.create_task(policy.generate.route("x", 2.0)) for _ in range(5)]
        await until(lambda: policy.status().queued == 3)
        for _ in range(10):
            with pytest.raises(errors.Overloaded, match="3 calls wait"):
                await policy.generate.route("x")
        flying[-1].cancel()
        await until(lambda: policy.status().queued == 2)
        with pytest.raises(errors.NoReplica, match="policy-0: ready"):
            await policy.generate.options(timeout=0.1).route("x")
        assert len(await asyncio.gather(*flying[:-1])) == 4
        status = policy.status()
        assert (status.overloaded, status.queued, status.replicas[0].load) == (10, 0, 0)


async def test_a_closed_service_says_so(make_engine: MakeEngine) -> None:
    async with make_engine():
        policy = await Policy.options(num_replicas=1, concurrency=1).as_service()
        flying = [asyncio.create_task(policy.generate.route("x", 60.0)) for _ in range(2)]
        await until(lambda: policy.status().queued == 1)
        await policy.close()
        await policy.close()
        for each in await asyncio.gather(*flying, return_exceptions=True):
            assert isinstance(each, errors.ServiceClosed | errors.ReplicaLost)
        for call in (policy.generate.route("x"), policy.pay.fanout(0.0)):
            with pytest.raises(errors.ServiceClosed):
                await call
    with pytest.raises(errors.NoEngine):
        await Policy.options().as_service()


@pytest.mark.thorough
async def test_kills_in_a_row_under_six_clients_lose_no_call(make_engine: MakeEngine) -> None:
    kills = 150 if make_engine is LocalEngine else 24  # Monarch starts a process in half a second
    async with make_engine(), await ServiceOptions(Counter, num_replicas=3).as_service() as counter:
        over = False

        async def client(number: int) -> int:
            count = 0
            while not over:
                assert await counter.echo.route((number, count), 0.005) == (number, count)
                count += 1
            return count

        clients = [asyncio.create_task(client(number)) for number in range(6)]
        descriptors = []
        for kill in range(kills):
            await until(lambda: len(pids(counter)) == 3)
            descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
            os.kill(pids(counter)[kill % 3], signal.SIGKILL)
            await until(lambda kill=kill: counter.status().lost == kill + 1)  # type: ignore[misc]
        over = True
        assert all(await asyncio.gather(*clients))
        assert median(descriptors[2 * kills // 3 :]) <= median(descriptors[kills // 5 : 2 * kills // 5]) + 3


# -- the parts that need no process: routing, options, metrics


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 60))
def test_no_replica_has_too_many_calls_and_none_is_idle_while_calls_wait(
    count: int, concurrency: int, calls: int
) -> None:
    options = ServiceOptions(object, concurrency=concurrency)
    ready = [ServiceReplica(f"policy-{slot}", slot, options, lambda replica: None) for slot in range(count)]
    for each in ready:
        each.health = "ready"
    for given_out in range(calls):
        found = choose(ready)
        assert (found is None) == (given_out >= count * concurrency)
        assert max(each.load for each in ready) <= concurrency
        assert max(each.load for each in ready) - min(each.load for each in ready) <= 1


@pytest.mark.parametrize(
    ("name", "value"), [("num_replicas", 0), ("tries", 0), ("silence", 0.0), ("timeout", math.nan), ("deadline", -1.0)]
)
def test_options_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        ServiceOptions(object, **{name: value})


def test_metrics_show_services_and_replicas() -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'holdfast[metrics]'")
    replica = ReplicaStatus(name="policy-1.2", slot=1, host="", pid=7, health="ready", load=3, restarts=2)
    status = ServiceStatus(
        name="policy", version=4, replicas=(replica,), queued=5, calls=60, retried=7, overloaded=8, lost=2
    )
    with service_metrics("0", lambda: (status,)) as url, urllib.request.urlopen(url, timeout=30.0) as answer:
        lines = answer.read().decode().splitlines()
    assert {
        'holdfast_service_calls_total{service="policy"} 60.0',
        'holdfast_service_lost_total{service="policy"} 2.0',
        'holdfast_service_queued{service="policy"} 5.0',
        'holdfast_service_version{service="policy"} 4.0',
        'holdfast_replica_ready{replica="1",service="policy"} 1.0',
        'holdfast_replica_load{replica="1",service="policy"} 3.0',
        'holdfast_replica_restarts{replica="1",service="policy"} 2.0',
    } <= set(lines)


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (GenerationTimeout(1.0, 4), True),
        (RegisterAway("sqlite:///x", "gone"), True),
        (OtherCluster("etcd://x", "another"), False),
        (StoreTimeout("get", 1, 1.0, "why"), True),
        (VersionGone(1, [2]), False),
        (errors.ActorDied("a", 1, "killed", "f"), True),
        (ValueError("no"), False),
    ],
)
def test_the_class_of_an_error_says_whether_it_is_tried_again(error: Exception, retried: bool) -> None:
    failed, unstarted = errors.EndpointFailed("a", "f", "s", "t"), errors.ActorStartFailed("a", "why")
    failed.__cause__ = unstarted.__cause__ = error
    assert getattr(error, "retryable", False) == failed.retryable == unstarted.retryable == retried
