"""A communicator that nobody holds any more, and nobody closed: it says so here, and goodbye to its peers."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, OpTimeout, PeerFailed, Revoked
from holdfast.harness import LocalCluster


def settled(seconds: float = 10.0) -> bool:
    """Whether no thread of a dropped communicator is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(each.name.startswith(("holdfast-dropped", "holdfast-ops")) for each in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


def collect_until(done: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Collect garbage until `done()`: the thread that ran an op lets go of it a moment after the op is complete."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.005)
    return done()


def test_a_dropped_communicator_warns_and_lets_everything_go(tmp_path: Path) -> None:
    comm = comms.connect("shm", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting")
    comm.all_reduce(torch.ones(2), async_op=True).wait()
    gone = weakref.ref(comm)
    with pytest.warns(ResourceWarning, match="Communicator 'default'.* was not closed"):
        del comm
        assert collect_until(lambda: gone() is None)
    assert settled()


def test_a_closed_communicator_is_dropped_in_silence(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    comm = comms.connect("shm", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting")
    comm.close()
    del comm
    gc.collect()
    assert not [
        each for each in recwarn if issubclass(each.category, ResourceWarning) and "closed" in str(each.message)
    ]


def test_an_op_of_a_dropped_communicator_is_still_done(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    with pytest.warns(ResourceWarning, match="was not closed") as warned:
        work = comms.connect("shm", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting").all_reduce(
            tensor, async_op=True
        )
        assert collect_until(lambda: len(warned) > 0)
    work.wait(10.0)
    assert settled()


def test_a_window_keeps_its_communicator(tmp_path: Path) -> None:
    window = comms.connect("shm", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting").window(torch.zeros(4))
    gc.collect()
    window.put(torch.ones(1), 0)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del window
        gc.collect()
    assert settled()


@pytest.mark.parametrize("backend", ["shm", "gloo", "ucx"])
def test_peers_of_a_dropped_communicator_do_not_wait_for_it(backend: str) -> None:
    def body(comm: Communicator) -> str:
        part = comm.split([0, 1], timeout=30.0)
        part.barrier()
        if comm.rank == 0:
            del part
            gc.collect()
            comm.barrier()
            return "dropped"
        began, said = time.monotonic(), ""
        try:
            part.barrier()
        except (PeerFailed, Revoked, OpTimeout) as error:
            said = type(error).__name__ if time.monotonic() - began < 15.0 else f"late: {error}"
        comm.barrier()
        part.close()
        return said

    with LocalCluster(2, backend, timeout=60.0) as cluster:
        dropped, said = cluster.run(body)
    assert dropped == "dropped" and said in ("PeerFailed", "Revoked"), said
