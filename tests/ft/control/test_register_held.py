"""The embedded register under stress: another process holds its lock, or it is used in forked children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from holdfast.ft import Session, Timeouts, faultpoints
from holdfast.ft.membership.events import CasFailed, CasWon, ViewRead
from holdfast.ft.node.register import Register, RegisterClient, RegisterThreads
from holdfast.ft.registers import RegisterAway, RegisterBusy, open_cell, sqlite
from holdfast.harness import LocalCluster
from support.children import Child, register_lock
from support.event_loop import until
from support.samples.tally import QUICK, assert_invariants
from support.views import view_of
from support.waiting import PATIENCE

VIEW = view_of("h", 1, "forming")


@pytest.fixture
def register(url: str) -> Iterator[Register]:
    with Register.open(url) as opened:
        yield opened


def test_a_lock_that_is_held_delays_writers_for_a_limited_time_and_readers_not_at_all(
    register: Register, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that must not wait gets an error at once."""
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.3)
    with register_lock(url):
        assert register.read() is None
        with pytest.raises(RegisterAway, match="lock"):
            register.compare_and_set(0, VIEW)
        with pytest.raises(RegisterBusy, match="another process holds its lock"):
            register.compare_and_set(0, VIEW, at_once=True)
        assert register.read(at_once=True) is None, "readers never wait"
    assert register.compare_and_set(0, VIEW, at_once=True)
    assert register.read(at_once=True) == VIEW


@contextmanager
def asking(url: str, patience: float, answers: list[Any]) -> Iterator[RegisterClient]:
    """A client of the register, in the running event loop."""
    loop = asyncio.get_running_loop()
    threads = RegisterThreads(url, loop)
    client = RegisterClient(
        threads, loop, Timeouts(heartbeat=0.05, suspect=0.1, rebuild=patience), answers.append, answers.append
    )
    try:
        yield client
    finally:
        client.end()
        threads.close()


async def test_an_event_loop_is_not_blocked_while_the_register_is_busy(register: Register, url: str) -> None:
    answers: list[Any] = []
    with asking(url, 10.0, answers) as client:
        with register_lock(url):
            client.propose(0, VIEW)
            for _ in range(10):
                await asyncio.sleep(0.01)
                assert answers == []
        await until(lambda: answers)
    assert answers == [CasWon(VIEW)]


async def test_a_request_to_a_busy_register_fails_in_time(register: Register, url: str) -> None:
    answers: list[Any] = []
    with asking(url, 0.2, answers) as client, register_lock(url):
        client.propose(0, VIEW)
        await until(lambda: answers)
    assert [type(answer) for answer in answers] == [CasFailed]
    assert "did not answer within 0.2 s" in answers[0].reason


async def test_a_view_that_another_process_writes_is_shown_at_once_while_the_job_is_formed(
    register: Register, url: str
) -> None:
    shown: list[Any] = []
    with asking(url, 10.0, shown) as client:
        client.follow()
        assert register.compare_and_set(0, VIEW)
        await until(lambda: shown)
    assert shown == [ViewRead(VIEW)]


def stop_in_the_lock() -> None:
    """Arm this process: the first one that is about to propose a view stops, holding the register's lock."""
    sqlite.BUSY_SECONDS = 2 * PATIENCE  # if a member waited for the lock, it would take that long
    directory = Path(os.environ["HOLDFAST_LOG_DIR"]).parent

    def fault(point: str, step: int, rank: int, epoch: int) -> None:
        if point != "rebuild.before_propose" or step < 5:
            return
        try:
            (directory / "stopped").touch(exist_ok=False)
        except FileExistsError:
            return
        with register_lock(f"sqlite://{directory}/register.sqlite"):
            (directory / "stopped").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60.0)  # a process of several threads may run on for a moment

    faultpoints.arm(fault)


def count(session: Session) -> int:
    """Do steps; the one after seven is done once a member has died."""
    for attempt in session.steps(40):
        with attempt:
            attempt.comm.barrier()
            while attempt.step == 7 and attempt.comm.size == 4:
                time.sleep(0.01)
                attempt.comm.barrier()
    return session.step


def test_a_member_stopped_while_it_holds_the_lock_is_fenced_and_the_others_continue() -> None:
    with LocalCluster(4, session={"timeouts": QUICK}, prepare=stop_in_the_lock) as ranks:
        job = ranks.start(count)
        job.wait_for("committed", step=6)
        job.kill(3)
        assert job.results() == [40, 40]
        events = job.events()
        stopped = float((job.directory / "stopped").read_text())
    assert_invariants(events)
    fenced = [event for event in events if event["kind"] == "fenced"]
    assert len({event["member"] for event in fenced}) == 1, "nobody else was silent"
    resumed = min(event["time"] for event in events if event["kind"] == "committed" and event["time"] > stopped)
    print(f"resumed {resumed - stopped:.3f} s after the stop")
    assert resumed - stopped < PATIENCE


# -- forks


def a_reader(pipe: Connection, url: str) -> None:
    """Report the content of the register, each change of it, and the number of descriptors."""
    for _ in range(2):
        cell = open_cell(url, "job")
        version, value = cell.read()
        pipe.send((version, value))
        while pipe.recv() == "look":
            found = cell.wait(version, 5.0)
            if found is not None:
                version = found[0]
            pipe.send(found)
        cell.close()


def a_parent(pipe: Connection, url: str) -> None:
    """Open the register and fork a reader, which continues when this process is killed."""
    cell = open_cell(url, "job")
    ours, theirs = os.pipe()
    if os.fork() == 0:
        a_reader(pipe, url)
        os._exit(0)
    cell.read()
    os.close(theirs)
    os.read(ours, 1)


@pytest.mark.parametrize("ancestors", ["closed it", "were killed"])
def test_a_fork_can_use_a_register_after_its_ancestors(ancestors: str, url: str, start: Callable[..., Child]) -> None:
    """Closing the parent's last handle would remove the WAL, and the child would see no change any more."""

    def write(version: int, value: bytes) -> None:
        with contextlib.closing(open_cell(url, "job")) as cell:
            assert cell.compare_and_set(version, value)
        child.tell("look")
        assert child.hear() == (version + 1, value)

    cell = open_cell(url, "job")
    cell.compare_and_set(0, b"first")
    child = start(a_reader if ancestors == "closed it" else a_parent, url)
    assert child.hear() == (1, b"first")
    cell.close()
    if ancestors == "were killed":
        child.kill()
    for version, value in ((1, b"second"), (2, b"third")):
        write(version, value)
    child.tell("open it again")
    assert child.hear() == (3, b"third")
    write(3, b"fourth")
    child.tell("end")
    if ancestors == "closed it":
        child.end()


def test_children_forked_amid_writes_can_write(url: str, start: Callable[..., Child]) -> None:
    """Regression: a child forked within a transaction of another thread stayed in it for ever."""

    def write() -> None:
        with contextlib.closing(open_cell(url, "busy")) as cell:
            version = cell.read()[0]
            while not over.is_set():
                version += cell.compare_and_set(version, bytes(20_000))

    def a_writer(pipe: Connection, number: int) -> None:
        pipe.send(open_cell(url, f"cell {number}").compare_and_set(0, b"mine"))

    over = threading.Event()
    open_cell(url, "job").close()
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(30):
            assert start(a_writer, number).hear()
    finally:
        over.set()
        thread.join()


def test_a_child_forked_in_the_middle_of_a_write_is_refused_a_register(
    url: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that the disk held up outlasted the fork's patience; the child waited for SQLite's locks for ever."""
    monkeypatch.setattr(sqlite, "FORK_SECONDS", 0.05)

    def refused(pipe: Connection) -> None:
        with pytest.raises(RegisterAway, match="forked while another thread had been writing"):
            open_cell(url, "job")
        pipe.send("refused")

    with contextlib.closing(open_cell(url, "busy")) as cell:
        with cell.lock:  # type: ignore[attr-defined]
            child = start(refused)
        assert child.hear() == "refused"
        assert cell.compare_and_set(0, b"the parent goes on")
        assert start(lambda pipe: pipe.send(open_cell(url, "other").read())).hear() == (0, b"")
