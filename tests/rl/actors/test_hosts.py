"""Actors on other hosts over Monarch: two hosts that are processes of this machine.

The driver is a process of its own: Monarch keeps the connections to hosts until that ends.
"""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.ft.launch.job_contract import ReservedPort
from support.programs.forked_programs import run_python
from support.source_tree import TESTS
from support.waiting import PATIENCE, next_line

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'"),
]
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}

DRIVER = """
import asyncio, os, signal, sys
import psutil
from holdfast.ft.launch.guardian import descendants
from holdfast.rl.actors.errors import ActorDied, ActorStartFailed, ActorHostAway
from holdfast.rl.actors.monarch import MonarchEngine
from holdfast.rl.actors.service import ServiceOptions
from support.event_loop import until
from support.samples.actors import Counter, Stillborn

def family(parent):
    return [parent, *descendants(parent)]

def kill(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # its parent had ended it
            pass

def host_process(address):
    wanted = {{"holdfast.rl.actors.monarch_host", address}}
    return next(each.pid for each in psutil.process_iter(["cmdline"]) if wanted <= set(each.info["cmdline"] or ()))

async def raised(kind, call):
    try:
        await call
    except kind as error:
        return error
    raise AssertionError(f"no {{kind.__name__}} was raised")

async def started_there(engine, host, *arguments):
    while True:
        try:
            return await engine.start("there", Counter, *arguments, host=host)
        except ActorHostAway:
            await asyncio.sleep(0.01)

async def main(first, second):
    async with asyncio.timeout(200.0), MonarchEngine(listen="127.0.0.1", silence=2.0) as engine:
{body}

asyncio.run(main(*sys.argv[1:]))
print("done", flush=True)
os._exit(0)
"""


@contextmanager
def host_at(address: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that serves a host. Monarch writes lines in pieces, from a thread: they go to a file."""
    command = [sys.executable, "-X", "faulthandler", "-P", "-m", "holdfast.rl.actors.monarch_host", address]
    with (
        log.open("wb") as file,
        subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=file) as host,
    ):
        try:
            yield host
        finally:
            host.kill()


def check_serving(host: subprocess.Popen[bytes], log: Path) -> None:
    """Fails the test if the host does not serve in time, with the stacks of its threads."""
    try:
        line = next_line(host.stdout)
    except AssertionError as late:
        host.send_signal(signal.SIGABRT)
        host.wait(PATIENCE)
        raise AssertionError(f"{late}: {log.read_text()}") from None
    assert line.startswith("serving"), line + log.read_text()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[str, str]]:
    logs = tmp_path / "host-0.log", tmp_path / "host-1.log"
    with ReservedPort("127.0.0.1") as one, ReservedPort("127.0.0.1") as other:
        addresses = f"tcp://127.0.0.1:{one.number}", f"tcp://127.0.0.1:{other.number}"
        with host_at(addresses[0], logs[0]) as first, host_at(addresses[1], logs[1]) as second:
            check_serving(first, logs[0])
            check_serving(second, logs[1])
            yield addresses


def test_a_host_whose_port_is_taken_says_so_and_ends(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with host_at(address, tmp_path / "host.log") as host:
            assert next_line(host.stdout) == "" and host.wait(PATIENCE) == 1
    said = (tmp_path / "host.log").read_text()
    assert f"HoldfastError: host {address} cannot be served: [Errno 98]" in said


def drive(hosts: tuple[str, str], body: str) -> None:
    program = DRIVER.format(body=textwrap.indent(textwrap.dedent(body), " " * 8))
    assert run_python("-c", program, *hosts, environ=ENVIRONMENT).endswith("done\n")


def test_actors_of_other_hosts_are_called_and_replicas_are_spread_over_hosts_and_come_back_there(
    hosts: tuple[str, str],
) -> None:
    drive(
        hosts,
        """
        told = []
        there = await engine.start("there", Counter, 5, host=first, environ={"COLOUR": "red"}, on_exit=told.append)
        here = await engine.start("here", Counter, 7)
        assert await there.call("add") == 6 and await here.call("add") == 8
        assert await there.call("variable", "COLOUR") == "red"
        assert await there.call("who") == there.pid and (there.host, here.host) == (first, "")
        assert psutil.Process(there.pid).ppid() != psutil.Process(here.pid).ppid(), "the zygotes"
        flying = asyncio.create_task(there.call("echo", 1, 60.0))
        await there.ping(30.0)
        os.kill(there.pid, signal.SIGKILL)
        assert "SIGKILL" in (await raised(ActorDied, flying)).how
        assert len(told) == 1 and not there.alive
        stillborn = engine.start("stillborn", Stillborn, "raise", host=second)
        assert "no such model" in str(await raised(ActorStartFailed, stillborn))

        options = ServiceOptions(Counter, num_replicas=4, hosts=(first, second))
        async with await options.as_service() as counter:
            before = counter.status()
            assert [each.host for each in before.replicas] == [first, second] * 2
            assert len({psutil.Process(each.pid).ppid() for each in before.replicas}) == 2, "the zygotes"
            flying = [asyncio.create_task(counter.echo.route(i, 0.5)) for i in range(16)]
            await asyncio.sleep(0.1)
            os.kill(before.replicas[1].pid, signal.SIGKILL)
            assert await asyncio.gather(*flying) == list(range(16))
            await until(lambda: counter.status().replicas[1].health == "ready")
            after = counter.status().replicas[1]
            assert (after.host, after.restarts, counter.status().lost) == (second, 1, 1)
        """,
    )


def test_a_host_that_does_not_answer_is_away_and_its_replicas_move(hosts: tuple[str, str]) -> None:
    """It is stopped with all of its processes. When it goes on, what it had is killed, and it is used again.

    So it is if all of its processes are killed at once, as when its machine restarts, and it is started anew.
    """
    drive(
        hosts,
        """
        def signal_host(address, number):
            for pid in family(host_process(address)):
                os.kill(pid, number)

        options = ServiceOptions(Counter, num_replicas=2, hosts=(first, second), timeout=60.0)
        async with await options.as_service() as counter:
            lost = counter.status().replicas[1]
            flying = [asyncio.create_task(counter.echo.route(i, 0.5)) for i in range(8)]
            await asyncio.sleep(0.1)
            signal_host(second, signal.SIGSTOP)
            assert await asyncio.gather(*flying) == list(range(8))
            await until(lambda: counter.status().replicas[1].health == "ready")
            assert (counter.status().replicas[1].host, counter.status().lost) == (first, 1)
            error = await raised(ActorHostAway, engine.start("there", Counter, host=second))
            assert error.host == second and "is away" in str(error)
            signal_host(second, signal.SIGCONT)
            await until(lambda: not os.path.exists(f"/proc/{lost.pid}"))
            assert await (await started_there(engine, second)).call("add") == 1

        import subprocess

        async with await options.as_service() as counter:
            before = host_process(second)
            away = []
            engine.on_host_away(away.append)
            kill(family(before))
            await until(lambda: away)
            assert away == [engine.host_identity(second)]
            command = [sys.executable, "-P", "-m", "holdfast.rl.actors.monarch_host", second]
            again = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
            try:
                back = await started_there(engine, second, 3)
                assert await back.call("add") == 4 and back.pid in family(again.pid)
                assert await counter.echo.route(5, 0.0) == 5
                os.kill(back.pid, signal.SIGKILL)
                await until(lambda: not back.alive)
                assert len(away) == 1
            finally:
                kill(family(again.pid))
                again.wait(30.0)
        """,
    )
