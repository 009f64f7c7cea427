"""Errors that end the process in plain gloo are exceptions over holdfast."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.comms import Communicator, Mismatch, PeerFailed, Recv, Send
from holdfast.harness import LocalCluster

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


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (torch.ones(2), torch.ones(5)),
        (torch.ones(5), torch.ones(2)),
        (torch.ones(500_000), torch.ones(2)),
        (torch.ones(0), torch.ones(2)),
        (torch.ones(2), torch.ones(2, dtype=torch.int32)),
    ],
    ids=["smaller", "larger", "much larger", "empty", "another dtype"],
)
def test_a_message_that_does_not_fit_is_a_mismatch(pair: LocalCluster, sent: torch.Tensor, taken: torch.Tensor) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with contextlib.suppress(PeerFailed):
                comm.send(sent, 1, timeout=20)
        else:
            with pytest.raises(Mismatch, match="rank 0 sent"):
                comm.recv(taken, 0, timeout=20)

    pair.run(body)


def test_messages_of_a_batch_that_do_not_fit_are_mismatches(pair: LocalCluster) -> None:
    def body(comm: Communicator) -> bool:
        peer = 1 - comm.rank
        with pytest.raises((Mismatch, PeerFailed)) as caught:
            comm.batch_send_recv([Send(torch.ones(5), peer, 3), Recv(torch.ones(2), peer, 3)], timeout=20)
        return caught.errisinstance(Mismatch)

    assert any(pair.run(body))


@pytest.mark.timeout(120)
def test_a_process_that_never_closed_ends_well_with_ops_pending(tmp_path: Path) -> None:
    """A transport thread that is inside gloo when the interpreter ends would end the process with SIGABRT."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", FORGETFUL, str(rank), str(tmp_path / "meet")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in ranks:
        _, said = process.communicate(timeout=100)
        assert process.returncode == 0, said.decode()
