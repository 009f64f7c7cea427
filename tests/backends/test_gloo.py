"""Errors that end the process in plain gloo are exceptions over holdfast."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from holdfast import comms
from holdfast.backends.common import tcp_channel
from holdfast.comms import Communicator, HoldfastError, Revoked
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import Liveness, PeerWatch
from holdfast.harness import LocalCluster
from support.waiting import PROGRAM_SECONDS

FORGETFUL = """
import sys
import torch
from holdfast import comms

comm = comms.connect("gloo", rank=int(sys.argv[1]), size=2, rendezvous="file://" + sys.argv[2])
comm.all_reduce(torch.ones(3))
for _ in range(20):
    comm.all_reduce(torch.ones(300_000), async_op=True)
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalCluster]:
    with LocalCluster(2, "gloo", timeout=60.0) as cluster:
        yield cluster


def test_a_process_that_never_closed_ends_well_with_ops_pending(tmp_path: Path) -> None:
    """A transport thread that is inside gloo when the interpreter ends would end the process with SIGABRT."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", FORGETFUL, str(rank), str(tmp_path / "meet")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in ranks:
        _, said = process.communicate(timeout=PROGRAM_SECONDS)
        assert process.returncode == 0, said.decode()


@pytest.mark.parametrize("op", ["collective", "message"])
def test_an_op_that_gloo_forgets_ends_when_all_peers_are_gone(op: str, pair: LocalCluster, tmp_path: Path) -> None:
    """Gloo may forget an op if its peers close their connections as it starts; here, one that never ends."""

    def body(comm: Communicator, meeting: Path) -> bool:
        from holdfast.backends.gloo.transport import GlooTransport

        class Forgotten:
            def wait(self, _: object) -> None:
                time.sleep(0.01)
                raise RuntimeError("Wait timeout")

            def is_completed(self) -> bool:
                return False

        with connect_again(comm, meeting) as again, contextlib.ExitStack() as at_last:
            transport = again.transport
            assert isinstance(transport, GlooTransport)
            if comm.rank == 1:
                again.abort()
                return True
            began, never = time.monotonic(), threading.Event()
            at_last.callback(never.set)
            with pytest.raises((HoldfastError, RuntimeError), match=r"by all peers|rank 1"):
                if op == "collective":
                    transport._wait(Forgotten(), began + 60.0)
                else:
                    transport._run("recv", lambda limit: never.wait(limit.total_seconds()), began + 60.0)
            return time.monotonic() < began + 60.0

    assert pair.run(body, tmp_path / "forgotten") == [True, True]


def connect_again(comm: Communicator, meeting: Path) -> Communicator:
    """Connect the ranks of `comm` once more."""
    where = f"file://{meeting}"
    return comms.connect("gloo", rank=comm.rank, size=comm.size, rendezvous=where, name="again", timeout=60.0)


def test_connecting_outlasts_a_rank_that_is_slower_than_one_attempt(pair: LocalCluster, tmp_path: Path) -> None:
    """The caller's timeout counts, not the limit of an attempt: all ranks begin the next attempt together."""

    def body(comm: Communicator, meeting: Path) -> float:
        from holdfast.backends.gloo import connecting

        longest, meet = connecting.ATTEMPT_SECONDS, connecting.wait_for_ranks

        def slowly(context: Context, liveness: Liveness, prefix: str) -> None:
            meet(context, liveness, prefix)
            first = prefix == "gloo/0/"
            connecting.ATTEMPT_SECONDS = 0.5 if first else longest
            if first and comm.rank == 1:
                time.sleep(1.0)

        connecting.wait_for_ranks = slowly
        try:
            with connect_again(comm, meeting) as again:
                again.all_reduce(total := torch.ones(1))
                return total.item()
        finally:
            connecting.ATTEMPT_SECONDS, connecting.wait_for_ranks = longest, meet

    assert pair.run(body, tmp_path / "slow") == [2.0, 2.0]


def test_a_listener_that_another_thread_opens_meanwhile_accepts(pair: LocalCluster, tmp_path: Path) -> None:
    """A group takes the sockets at the addresses that gloo published, and no others."""

    def body(comm: Communicator, meeting: Path) -> int:
        from holdfast.backends.gloo import connecting

        opened: list[socket.socket] = []
        construct = connecting._Attempt._construct

        def beside(attempt: connecting._Attempt, *arguments: Any) -> Any:
            opened.extend(socket.create_server(("127.0.0.1", 0)) for _ in range(5))
            return construct(attempt, *arguments)

        opened.append(socket.create_server(("127.0.0.1", 0)))
        connecting._Attempt._construct = beside  # type: ignore[method-assign]
        try:
            with connect_again(comm, meeting):
                for listener in opened:
                    with socket.create_connection(listener.getsockname(), timeout=10.0):
                        listener.settimeout(10.0)
                        listener.accept()[0].close()
            return len(opened)
        finally:
            connecting._Attempt._construct = construct  # type: ignore[method-assign]
            for listener in opened:
                listener.close()

    assert pair.run(body, tmp_path / "beside") == [6, 6]


def test_a_rank_that_aborts_leaves_its_reason_to_those_that_lose_its_connection(pair: LocalCluster) -> None:
    def body(comm: Communicator) -> str:
        comm.barrier()
        if comm.rank == 1:
            comm.abort("disk on fire")
            return ""
        with pytest.raises(Revoked, match="rank 1 aborted: disk on fire"):
            comm.all_reduce(torch.ones(2), timeout=20.0)
        return "told"

    assert pair.run(body)[0] == "told"


def test_a_rank_whose_address_cannot_be_reached_for_a_window_is_named() -> None:
    class Living:
        def look(self) -> None: ...
        def check(self, rank: int) -> None: ...

    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    card, watch = tcp_channel._CARD.pack(b"127.0.0.1", bytes(16), port), cast(PeerWatch, Living())
    with pytest.raises(HoldfastError, match=rf"rank 1 cannot be reached at 127.0.0.1:{port} for a window"):
        tcp_channel._dial(1, card, 2, watch, time.monotonic() + 5.0)
