"""`connect`: every form of rendezvous, preference lists, ranks that disagree, and ranks that die while connecting.

A communicator that is garbage-collected without `close()` warns, and its peers do not wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast import comms
from holdfast.backends.gloo.connecting import ATTEMPT_SECONDS
from holdfast.backends.inproc import transport as inproc
from holdfast.backends.inproc.transport import InprocTransport
from holdfast.comms import Communicator, PeerFailed, Revoked
from holdfast.comms.algorithms.message_passing import cost
from holdfast.comms.connect import KnownMembers, choose_backend, connect_members
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import hookimpl
from holdfast.comms.rendezvous import offer_exchange
from holdfast.comms.rendezvous.offer_exchange import OfferExchange
from holdfast.comms.transport.base import Context, Link, Peer
from holdfast.comms.transport.liveness import this_process
from holdfast.harness import LocalCluster
from support.children import Child
from support.comms.meeting import alone, in_threads, registered, total
from support.comms.ranks import on_ranks, second_tier
from support.comms.torch_groups import ENVIRON, default_group
from support.waiting import PATIENCE, becomes_true


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Where the ranks of a test meet."""
    return f"file://{tmp_path}/meeting"


@pytest.mark.parametrize("backend", ["inproc", "gloo"])
def test_meet_in_a_file_and_use_the_name_again_after_close(place: str, backend: str) -> None:
    for _ in range(3):
        assert in_threads(2, lambda r: total(comms.connect(backend, rank=r, size=2, rendezvous=place))) == [3.0, 3.0]


def test_ranks_meet_again_though_one_has_forgotten_how_often_they_met(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of counted names is bounded, so a process that uses ever new names does not grow."""
    monkeypatch.setattr(offer_exchange, "_REMEMBERED", 3)
    counters = offer_exchange.meeting_counters()
    for turn in range(100):
        counters(f"name {turn % 50}").number = 7
    assert counters("name 0").number == 0, "forgotten"
    counters("name 49").number = 8
    assert counters("name 49").number == 8
    for turn in range(8):
        name = f"name {turn % 2}"
        if turn > 3:
            monkeypatch.setattr(importlib.import_module("holdfast.comms.connect"), "_counts", counters)
        assert total(comms.connect("shm", rank=0, size=1, rendezvous=place, name=name)) == 1.0


def test_connect_takes_and_logs_the_first_backend_that_all_ranks_can_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "holdfast.comms"), alone(tmp_path, "inproc,shm,gloo") as comm:
        assert comm.backend == "inproc"
        assert [record.message for record in caplog.records] == ["communicator 'default' of 1 ranks uses inproc"]


def test_the_error_of_an_unknown_backend_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(comms.BackendUnavailable) as caught:
        comms.connect("smoke-signals", rank=0, size=1)  # refused before it looks for a meeting place
    assert caught.value.name == "smoke-signals"
    assert all(name in str(caught.value) for name in ("gloo", "inproc", "shm", "ucx"))
    with pytest.raises(comms.BackendUnavailable, match="torch") as caught:
        alone(tmp_path, "rccl")
    assert caught.value.install_hint
    with pytest.raises(comms.Unsupported, match="memory plane only"):
        alone(tmp_path, "nixl")
    with pytest.raises(comms.BackendUnavailable, match="no backend offers itself for tensors on meta"):
        comms.connect(rank=0, size=1, device="meta")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": 2, "size": 2}, "out of range"),
        ({"rank": -1, "size": 2}, "out of range"),
        ({"rank": 0, "size": 0}, "out of range"),
        ({"rank": 0, "size": 1, "rendezvous": "carrier://pigeon"}, "is not env://"),
        ({"rank": 0, "size": 1, "rendezvous": "tcp://nowhere"}, "host and a port"),
        ({"rank": 0, "size": 1, "rendezvous": "file://relative"}, "absolute path"),
        *(
            ({"rank": 0, "size": 1, "rendezvous": f"file:///a/x{end}"}, "file:///path")
            for end in ("#1", "?1", "#", "%", "%00")
        ),
        ({"rank": 0, "size": 1, "rendezvous": "env://"}, "MASTER_ADDR"),
        ({"size": 1}, "RANK is not in the environment"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match=said):
        comms.connect("inproc", **arguments)


@pytest.mark.parametrize("odd", [{"size": 3, "timeout": 2.0}, {"backend": "inproc,gloo"}, {"backend": "inproc,pigeon"}])
def test_ranks_with_different_sizes_or_backends_raise_an_error(place: str, odd: dict[str, Any]) -> None:
    def body(rank: int) -> comms.Communicator:
        arguments: dict[str, Any] = {"backend": "inproc", "size": 2, "timeout": 10.0} | (odd if rank else {})
        return comms.connect(rank=rank, rendezvous=place, **arguments)

    said = "must pass the same size" if "size" in odd else "must ask for the same"
    for error in in_threads(2, body):
        late = "size" in odd and isinstance(error, comms.OpTimeout)
        assert late or (isinstance(error, comms.Mismatch) and said in str(error))


def test_peers_on_other_hosts_rule_out_backends_of_one_host_and_dead_ones_are_named() -> None:
    here, there, stranger = this_process(), Peer("another host", 1, 1), Peer(this_process().host, 2**22, 1)
    assert choose_backend("auto", [here, here]) == "shm"
    assert choose_backend("auto", [here, there]) == "gloo"
    with pytest.raises(comms.BackendUnavailable, match="different hosts"):
        choose_backend("shm", [here, there])
    members = KnownMembers(rank=0, peers=[here, stranger], store=dist.HashStore(), epoch=3)
    with pytest.raises(comms.Unsupported):
        connect_members("inproc", members, timeout=1.0)
    with pytest.raises(comms.PeerFailed) as caught:
        connect_members("shm", members, timeout=5.0)
    assert caught.value.ranks == (1,)


def connect_again(comm: comms.Communicator, place: str, where: str) -> str:
    """Rank 1 kills itself when it calls the function `where`."""
    if comm.rank == 1:
        module, _, name = where.rpartition(".")
        setattr(importlib.import_module(module), name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    try:
        comms.connect(comm.backend, rank=comm.rank, size=comm.size, rendezvous=place, name="again").close()
    except comms.PeerFailed as error:
        return f"lost {error.ranks}"
    return "did not notice"


def test_ranks_that_connect_with_a_dying_rank_fail_at_once(process_backend: str, place: str) -> None:
    with LocalCluster(3, process_backend) as cluster:
        outcomes = cluster.outcomes(connect_again, place, "holdfast.comms.connect._join")
    survivors = [outcome.value for outcome in outcomes if outcome.rank != 1]
    assert "lost (1,)" in survivors, "the other survivor may name the one that gives up first"
    assert all(str(value).startswith("lost") for value in survivors), [repr(outcome) for outcome in outcomes]


def test_a_rank_that_waits_for_the_costs_of_rank_0_learns_that_another_has_died() -> None:
    """Rank 0 may have given up before it published them, because of the same death."""
    here, dead = this_process(), Peer(this_process().host, 2**22, 1)
    deadline, device = time.monotonic() + 30, torch.device("cpu")
    context = Context(1, 3, "costs", 0, device, dist.HashStore(), (here, here, dead), deadline)
    with pytest.raises(comms.PeerFailed) as caught:
        cost.agree(context, Link(2e-6, 8e9, "mpi"))
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("backend", ["inproc", "shm"])
def test_a_rank_0_that_cannot_publish_its_board_keeps_no_memory_of_it(backend: str) -> None:
    class Lost(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            raise PeerFailed((1,), "its store is gone")

    def memory() -> list[str]:
        files = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return [each for each in files if each.startswith("/memfd:holdfast-unpublished")] + list(inproc._boards)

    here, device = this_process(), torch.device("cpu")
    context = Context(0, 2, "unpublished", 0, device, Lost(), (here, here), time.monotonic() + PATIENCE)
    for _ in range(2):
        with pytest.raises(PeerFailed, match="its store is gone"):
            registry().backend(backend).info.connect(context)
    assert memory() == []


def test_connecting_gloo_does_not_wait_for_a_dead_rank(place: str) -> None:
    with LocalCluster(3, "gloo", grace=ATTEMPT_SECONDS / 2) as cluster:
        outcomes = cluster.outcomes(connect_again, place, "holdfast.backends.gloo.connecting.run_interruptible")
    assert [outcome.value for outcome in outcomes] == ["lost (1,)", None, "lost (1,)"]


@pytest.mark.parametrize("seems_alive_for", [0.0, 0.5])
def test_a_rank_that_notices_a_failed_meeting_late_still_names_the_dead_rank(
    tmp_path: Path, seems_alive_for: float, start: Callable[..., Child]
) -> None:
    """Rank 1 fails and the meeting is given up because of it after rank 0 found all ranks alive.

    The kernel calls rank 1 gone before rank 0 finds the meeting over, or while rank 0 waits at the next one.
    """
    where = f"file://{tmp_path}/meeting"
    victim = start(lambda pipe: comms.connect("shm", rank=1, size=2, rendezvous=where).close())
    checked, failed = OfferExchange._check_alive, []

    def check_alive(exchange: OfferExchange) -> None:
        checked(exchange)
        if len(exchange._newest) == 2 and not failed:
            failed.append(True)
            victim.stop()
            death = threading.Timer(seems_alive_for, victim.kill)
            death.start()
            if not seems_alive_for:
                death.join()
            dist.FileStore(f"{tmp_path}/meeting", -1).add("holdfast/default/0/left", 1)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(comms.PeerFailed, match="rank 1"):
        patch.setattr(OfferExchange, "_check_alive", check_alive)
        comms.connect("shm", rank=0, size=2, rendezvous=where, timeout=2 * PATIENCE)


def late(store: dist.Store) -> dist.Store:
    """The same store with delayed answers."""

    class Late(dist.Store):
        def set(self, key: str, value: str) -> None:
            store.set(key, value)

        def get(self, key: str) -> bytes:
            value = store.get(key)
            time.sleep(0.01)
            return value

        def check(self, keys: list[str]) -> bool:
            return store.check(keys)

        def wait(self, keys: list[str], *limit: Any) -> None:
            store.wait(keys, *limit)
            time.sleep(0.01)

    return Late()


@on_ranks(2, of="process_backend")
def test_a_rank_that_closes_at_once_does_not_disturb_ranks_that_still_connect(
    comm: comms.Communicator, tmp_path: Path
) -> None:
    """They connect and close repeatedly. Each time one of the two is late, and the other does not wait for it."""
    for turn in range(60):
        store: dist.Store = dist.FileStore(f"{tmp_path}/{turn}", comm.size)
        store = late(store) if comm.rank == turn % 2 else store
        members = KnownMembers(rank=comm.rank, peers=comm.peers, store=store, epoch=0, name=f"turn-{turn}")
        connect_members(comm.backend, members).close()


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("place", ["file", "tcp"])
def test_all_ranks_name_the_rank_without_the_backend_and_can_connect_later(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: int, place: str
) -> None:
    where = f"file://{tmp_path}/meeting" if place == "file" else f"tcp://127.0.0.1:{port}"
    module, own = importlib.import_module("holdfast.comms.connect"), threading.local()
    asked = module._requested_backends

    def requested(*arguments: Any, **named: Any) -> tuple[list[str], dict[str, str]]:
        names, unavailable = asked(*arguments, **named)
        return names, {"inproc": "not installed here"} if own.rank == lacking else unavailable

    def body(rank: int) -> Any:
        own.rank = rank
        return total(comms.connect("inproc", rank=rank, size=2, rendezvous=where, timeout=10.0))

    with monkeypatch.context() as patch:
        patch.setattr(module, "_requested_backends", requested)
        for error in in_threads(2, body):
            assert isinstance(error, comms.BackendUnavailable), error
            assert f"rank {lacking}: not installed here" in str(error)
    assert in_threads(2, body) == [3.0, 3.0]


def test_a_timeout_names_the_missing_ranks_and_those_that_gave_up_meet_again(place: str, port: int) -> None:
    connect = partial(comms.connect, "inproc", size=4, rendezvous=place)
    for error in in_threads(2, lambda rank: connect(rank=rank, timeout=3.0)):
        assert isinstance(error, comms.OpTimeout) and error.op == "connect" and error.missing_ranks == (2, 3)
    with pytest.raises(comms.OpTimeout):
        connect(rank=0, timeout=0.3)
    with pytest.raises(comms.OpTimeout):  # there is no server
        comms.connect("inproc", rank=1, size=2, rendezvous=f"tcp://127.0.0.1:{port}", timeout=0.5)
    assert in_threads(4, lambda rank: total(connect(rank=rank))) == [10.0] * 4


def test_members_that_gave_up_a_split_at_different_times_meet_again(place: str) -> None:
    given_up = threading.Event()

    def body(rank: int) -> float:
        with comms.connect("inproc", rank=rank, size=2, rendezvous=place) as comm:
            if rank == 0:
                with pytest.raises(comms.OpTimeout):
                    comm.split([0, 1], timeout=0.3)
                given_up.set()
            given_up.wait(10.0)
            return total(comm.split([0, 1]))

    assert in_threads(2, body) == [3.0, 3.0]


def test_a_rank_that_connects_a_second_time_is_refused(tmp_path: Path, start: Callable[..., Child]) -> None:
    """That does not disturb the first connection, and the rank can connect again after it."""

    def second(pipe: Connection) -> None:
        pipe.recv()
        for _ in range(2):
            with pytest.raises(comms.Mismatch, match="rank 0 is taken by another process"):
                alone(tmp_path, timeout=20.0)
        pipe.send("refused")

    other = start(second)
    with alone(tmp_path) as comm:
        with pytest.raises(comms.Mismatch, match="rank 0 of 'default' is connected"):
            alone(tmp_path)
        other.tell("connect")
        assert other.hear() == "refused"
        comm.barrier()
    alone(tmp_path).close()


WAITS: list[Callable[[comms.Communicator], object]] = [
    lambda comm: comm.split([0, 1]),
    lambda comm: comm.barrier(),
    lambda comm: comm.recv(torch.ones(4), 1),
    lambda comm: comm.all_reduce(torch.ones(4), async_op=True).wait(),
    lambda comm: comm.window(torch.ones(4)),
]


def interrupted(call: Callable[[], object]) -> None:
    """Check that Ctrl-C ends a call that waits. It comes again if Python saw it just before the thread slept."""
    heard = threading.Event()

    def press() -> None:
        pause = 0.3
        while not heard.wait(pause):
            os.kill(os.getpid(), signal.SIGINT)
            pause = 1.0

    before, began = signal.signal(signal.SIGINT, signal.default_int_handler), time.monotonic()
    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    heard.set()
    pressing.join()
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < PATIENCE, "long before the timeouts of the calls"


@on_ranks(2, "shm", "ucx", "gloo", timeout=4 * PATIENCE)
def test_ctrl_c_interrupts_a_call_that_waits(comm: comms.Communicator, place: str) -> None:
    for wait in WAITS:
        with comm.split([0, 1], timeout=2 * PATIENCE) as part:
            if comm.rank == 0:
                interrupted(partial(wait, part))
            comm.barrier()
    if comm.rank == 0:
        interrupted(lambda: comms.connect(comm.backend, rank=0, size=2, rendezvous=place, timeout=2 * PATIENCE))


@on_ranks(2, "gloo", environ={**ENVIRON, "HOLDFAST_BACKEND": "gloo"}, timeout=4 * PATIENCE)
def test_ctrl_c_interrupts_a_call_of_torch_that_waits(comm: comms.Communicator, tmp_path: Path) -> None:
    waits: list[Callable[[], object]] = [
        lambda: dist.recv(torch.ones(4), 1),
        lambda: dist.irecv(torch.ones(4), 1).wait(),
    ]
    for number, wait in enumerate(waits):
        with default_group(comm, tmp_path, init_method=f"file://{tmp_path}/{number}"):
            if comm.rank == 0:
                interrupted(wait)
            comm.barrier()
    if comm.rank == 0:
        store = dist.FileStore(f"{tmp_path}/alone", -1)
        interrupted(lambda: dist.init_process_group("holdfast", store=store, rank=0, world_size=2))


@on_ranks(1, "shm", timeout=4 * PATIENCE)
def test_ctrl_c_interrupts_connect_while_the_store_does_not_answer(comm: comms.Communicator) -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{door.getsockname()[1]}"
        for there in (lambda: None, door.listen):
            there()
            interrupted(lambda: comms.connect("shm", rank=1, size=2, rendezvous=place, timeout=2 * PATIENCE))


def settled(seconds: float = 10.0) -> bool:
    """Whether all threads of dropped communicators have ended."""
    names = ("holdfast-dropped", "holdfast-ops")
    return becomes_true(lambda: not any(each.name.startswith(names) for each in threading.enumerate()), seconds)


def collect_until(done: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Collect garbage until `done()`: the thread that ran an op drops its references a little later."""

    def collected() -> bool:
        gc.collect()
        return done()

    return becomes_true(collected, seconds, interval=0.005)


@contextlib.contextmanager
def a_drop() -> Iterator[None]:
    """The last reference to a communicator is dropped within: that warns, and releases everything."""
    with pytest.warns(ResourceWarning, match="Communicator 'default'.* was not closed") as warned:
        yield
        assert collect_until(lambda: len(warned) > 0)
    assert settled()


def use(comm: Communicator, event: object) -> None:
    """A hook that refers to its communicator."""
    assert comm.rank == 0


@pytest.mark.parametrize("backend", ["inproc", "shm", "gloo"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_dropped_communicator_warns_unless_it_was_closed_though_a_hook_refers_to_it(
    closed: bool, backend: str, recwarn: pytest.WarningsRecorder
) -> None:
    comm = comms.connect(backend, rank=0, size=1, rendezvous=dist.HashStore())
    comm.hooks.before_op(partial(use, comm))
    comm.hooks.on_abort(partial(use, comm))
    comm.all_reduce(torch.ones(2))
    comm.all_reduce(torch.ones(2), async_op=True).wait()
    gone = weakref.ref(comm)
    if closed:
        comm.close()
    with contextlib.nullcontext() if closed else a_drop():
        del comm
        assert collect_until(lambda: gone() is None)
    assert settled()
    assert not [each for each in recwarn if each.category is ResourceWarning and "closed" in str(each.message)]


def test_the_ops_of_a_dropped_communicator_still_have_its_hooks(tmp_path: Path) -> None:
    comm, ended, may_end = alone(tmp_path), list[str](), threading.Event()
    comm.hooks.before_op(partial(use, comm))
    comm.hooks.after_op(lambda event: ended.append(event.op))

    def wait(deadline: float) -> None:
        may_end.wait(PATIENCE)

    comm.issue("wait", 0, wait, None, async_op=True)
    work = comm.all_reduce(torch.ones(2), async_op=True)
    with a_drop():
        del comm
        gc.collect()
        may_end.set()
        work.wait(PATIENCE)
    assert ended == ["wait", "all_reduce"]


def test_a_window_keeps_its_communicator_alive(tmp_path: Path) -> None:
    window = alone(tmp_path).window(torch.zeros(4))
    gc.collect()
    window.put(torch.ones(1), 0)
    with a_drop():
        del window


@on_ranks(2, "shm", "gloo", *second_tier("ucx"), timeout=4 * PATIENCE)
def test_peers_of_a_dropped_communicator_do_not_wait_for_it(comm: Communicator) -> None:
    part = comm.split([0, 1], timeout=2 * PATIENCE)
    part.barrier()
    if comm.rank == 0:
        del part
        gc.collect()
        comm.barrier()
        return
    began = time.monotonic()
    with pytest.raises((PeerFailed, Revoked)):
        part.barrier()
    assert time.monotonic() - began < PATIENCE
    comm.barrier()
    part.close()


def fail(context: Context) -> InprocTransport:
    """Pass a transport to `meanwhile`, then close it and fail to connect."""
    transport = inproc.connect(context)
    context.meanwhile(transport)
    transport.close()
    raise PeerFailed((1,), "it did not come")


def move(context: Context) -> InprocTransport:
    """Pass a transport to `meanwhile`, then close it and return another one."""
    with contextlib.suppress(PeerFailed):
        fail(context)
    return inproc.connect(context)


@pytest.mark.parametrize(("connect", "connects"), [(fail, False), (move, True)])
def test_a_transport_that_its_backend_closed_is_not_closed_again(
    connect: Callable[[Context], InprocTransport],
    connects: bool,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    info = dataclasses.replace(inproc.holdfast_backends()[0], name="handing-over", connect=connect)
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    members = KnownMembers(rank=0, peers=[this_process()], store=dist.HashStore(), epoch=0)
    with registered(SimpleNamespace(holdfast_backends=hookimpl(lambda: [info]))):
        with contextlib.nullcontext() if connects else pytest.raises(PeerFailed):
            connect_members("handing-over", members).close()
        gc.collect()
        assert settled()
    assert not failures
    assert not [each for each in recwarn if issubclass(each.category, ResourceWarning)]
