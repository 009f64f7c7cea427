"""Errors that end the process in plain gloo are exceptions over holdfast."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast import comms
from holdfast.backends.common import tcp_channel
from holdfast.backends.gloo import connecting
from holdfast.backends.gloo.transport import GlooTransport, _header_of, exchange
from holdfast.comms import Communicator, HoldfastError, Revoked
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import Liveness
from support.comms.ranks import on_ranks, on_ranks_of, shared_ranks
from support.programs.forked_programs import ForkedProgram, run_python
from support.waiting import PROGRAM_SECONDS, becomes_true

FORGETFUL = """
import contextlib, sys
import torch
from holdfast import comms

comm = comms.connect("gloo", rank=int(sys.argv[1]), size=2, rendezvous="file://" + sys.argv[2], timeout=120.0)
comm.all_reduce(torch.ones(3))
with contextlib.suppress(comms.Revoked):  # the other has ended already
    for _ in range(20):
        comm.all_reduce(torch.ones(300_000), async_op=True)
"""

LEFT = """
import contextlib, sys, time
import torch
from holdfast import comms

comm = comms.connect("gloo", rank=int(sys.argv[1]), size=2, rendezvous="file://" + sys.argv[2], timeout=120.0)
comm.all_reduce(torch.ones(3))
if comm.rank == 1:
    with contextlib.suppress(comms.PeerFailed):
        comm.recv(torch.ones(1), src=0)  # so long as the other lives
else:
    comm.transport._sockets.clear()  # so that no abort ends the op
    comm.transport._seq = 0
    comm.all_reduce(torch.ones(3), async_op=True, timeout=1000.0)
    while comm.transport._seq == 0:
        time.sleep(0.01)
"""


pair = shared_ranks(2, "gloo")


@pytest.mark.parametrize(
    "program",
    [pytest.param(FORGETFUL, id="the peer has ended"), pytest.param(LEFT, id="an op that never ends")],
)
def test_a_process_that_never_closed_ends_well_with_ops_pending(program: str, tmp_path: Path) -> None:
    """A transport thread that is inside gloo when the interpreter ends would end the process with SIGABRT.

    To destroy a group as its module is cleared would wait for its op.
    """
    meet = str(tmp_path / "meet")
    with ForkedProgram(program, ["program.py", "1", meet], None, os.environ) as other:
        run_python("-c", program, "0", meet)
        done = other.communicate(PROGRAM_SECONDS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("op", ["collective", "message"])
@on_ranks_of("pair")
def test_an_op_that_gloo_forgets_ends_when_all_peers_are_gone(comm: Communicator, op: str, tmp_path: Path) -> None:
    """Gloo may forget an op if its peers close their connections as it starts; here, one that never ends."""

    def wait(_: object) -> None:
        time.sleep(0.01)
        raise RuntimeError("Wait timeout")

    with connect_again(comm, tmp_path) as again:
        transport = again.transport
        assert isinstance(transport, GlooTransport)
        if comm.rank == 1:
            again.abort()
            return
        began, never = time.monotonic(), threading.Event()
        try:
            with pytest.raises((HoldfastError, RuntimeError), match=r"by all peers|rank 1"):
                if op == "collective":
                    transport._wait(SimpleNamespace(wait=wait, is_completed=lambda: False), began + 60.0)
                else:
                    transport._run("recv", lambda: never.wait(60.0), began + 60.0)
            assert time.monotonic() < began + 60.0
        finally:
            never.set()


@on_ranks_of("pair")
def test_an_abort_that_takes_a_while_leaves_no_threads_of_its_group(comm: Communicator, tmp_path: Path) -> None:
    """Its op waits until the connections are closed: gloo cannot end it before, and the group would stay."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    with connect_again(comm, tmp_path) as again, pytest.MonkeyPatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(again.transport, "_leave_reason", lambda reason: time.sleep(0.3))
            aborting = threading.Timer(0.05, again.abort)
            aborting.start()
            with pytest.raises(Revoked):
                again.barrier()
            aborting.join()
        comm.barrier()
    assert becomes_true(lambda: threads() <= before, 20.0)


def connect_again(comm: Communicator, folder: Path) -> Communicator:
    """Connect the ranks of `comm` once more."""
    where = f"file://{folder}/meeting"
    return comms.connect("gloo", rank=comm.rank, size=comm.size, rendezvous=where, name="again", timeout=60.0)


@on_ranks_of("pair")
def test_connecting_outlasts_a_rank_that_is_slower_than_one_attempt(comm: Communicator, tmp_path: Path) -> None:
    """The caller's timeout counts, not the limit of an attempt: all ranks begin the next attempt together."""
    longest, meet = connecting.ATTEMPT_SECONDS, connecting.wait_for_ranks

    def slowly(context: Context, liveness: Liveness, prefix: str) -> None:
        meet(context, liveness, prefix)
        first = prefix == "gloo/0/"
        connecting.ATTEMPT_SECONDS = 0.5 if first else longest
        if first and comm.rank == 1:
            time.sleep(1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "ATTEMPT_SECONDS", longest)
        patch.setattr(connecting, "wait_for_ranks", slowly)
        with connect_again(comm, tmp_path) as again:
            again.all_reduce(total := torch.ones(1))
            assert total.item() == 2


@on_ranks_of("pair")
def test_a_listener_that_another_thread_opens_meanwhile_accepts(comm: Communicator, tmp_path: Path) -> None:
    """A group takes the sockets at the addresses that gloo published, and no others."""
    opened = [socket.create_server(("127.0.0.1", 0))]
    construct = connecting._Attempt._construct

    def beside(attempt: connecting._Attempt, *arguments: Any) -> Any:
        opened.extend(socket.create_server(("127.0.0.1", 0)) for _ in range(5))
        return construct(attempt, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting._Attempt, "_construct", beside)
        with connect_again(comm, tmp_path):
            for listener in opened:
                with listener, socket.create_connection(listener.getsockname(), timeout=10.0):
                    listener.settimeout(10.0)
                    listener.accept()[0].close()
    assert len(opened) == 6


@on_ranks_of("pair")
def test_a_rank_that_aborts_leaves_its_reason_to_those_that_lose_its_connection(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        comm.abort("disk on fire")
        return
    with pytest.raises(Revoked, match="rank 1 aborted: disk on fire"):
        comm.all_reduce(torch.ones(2), timeout=20.0)


@on_ranks(2, "gloo", timeout=30.0)
def test_a_connected_group_accepts_no_connection(comm: Communicator) -> None:
    """A flood of its ports takes no descriptors."""
    doors = []
    for number, _ in connecting.sockets():
        with socket.socket(fileno=os.dup(number)) as each:
            internet = each.family in (socket.AF_INET, socket.AF_INET6)
            if internet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                doors.append(each.getsockname()[:2])
    assert doors
    for door in doors:
        with socket.socket() as stranger:
            stranger.settimeout(0.3)
            assert stranger.connect_ex(door) != 0
    began = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - began < 0.1, "idle"
    comm.barrier()


def test_a_rank_whose_address_cannot_be_reached_for_a_window_is_named() -> None:
    living: Any = SimpleNamespace(look=lambda: None, check=lambda rank: None)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    card = tcp_channel._CARD.pack(b"127.0.0.1", bytes(16), port)
    with pytest.raises(HoldfastError, match=rf"rank 1 cannot be reached at 127.0.0.1:{port} for a window"):
        tcp_channel._dial(1, card, 2, living, time.monotonic() + 5.0)


def test_all_messages_of_a_batch_have_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a second: the next has one less."""
    clock, limits = [100.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def wait(limit: timedelta) -> None:
        limits.append(limit.total_seconds())
        clock[0] += 1.0

    def start(tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Torch's send or receive; every message has the header of `tensor`."""
        if tensors[0].dtype == torch.int64:
            tensors[0].copy_(_header_of(tensor))
        return SimpleNamespace(wait=wait)

    tensor, group = torch.ones(4), SimpleNamespace(send=start, recv=start)
    exchange(group, 0, [(tensor, 1, 0)], [(tensor, 1, 0), (tensor, 2, 0)], clock[0] + 60.0)
    assert limits == [60.0 - number for number in range(6)], "of two headers, a header and a message sent, two messages"
