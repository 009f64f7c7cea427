"""A communicator that is garbage-collected without `close()` warns, and its peers do not wait for it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holdfast import comms
from holdfast.backends.inproc import transport as inproc
from holdfast.backends.inproc.transport import InprocTransport
from holdfast.comms import Communicator, OpTimeout, PeerFailed, Revoked
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.comms.plugins.spec import BackendInfo, hookimpl
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import this_process
from holdfast.harness import LocalCluster
from support.waiting import PATIENCE, becomes_true


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


def test_a_dropped_communicator_warns_and_releases_everything(tmp_path: Path) -> None:
    comm = comms.connect("shm", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting")
    comm.all_reduce(torch.ones(2), async_op=True).wait()
    gone = weakref.ref(comm)
    with pytest.warns(ResourceWarning, match="Communicator 'default'.* was not closed") as warned:
        del comm
        # The thread of another communicator may collect it: it is gone a moment before it warns.
        assert collect_until(lambda: gone() is None and len(warned) > 0)
    assert settled()


def test_dropping_a_closed_communicator_does_not_warn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    comm = comms.connect("shm", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting")
    comm.close()
    del comm
    gc.collect()
    assert not [
        each for each in recwarn if issubclass(each.category, ResourceWarning) and "closed" in str(each.message)
    ]


def test_an_asynchronous_op_of_a_dropped_communicator_still_completes(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    with pytest.warns(ResourceWarning, match="was not closed") as warned:
        work = comms.connect("shm", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting").all_reduce(
            tensor, async_op=True
        )
        assert collect_until(lambda: len(warned) > 0)
    work.wait(10.0)
    assert settled()


def test_a_window_keeps_its_communicator_alive(tmp_path: Path) -> None:
    window = comms.connect("shm", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting").window(torch.zeros(4))
    gc.collect()
    window.put(torch.ones(1), 0)
    with pytest.warns(ResourceWarning, match="was not closed") as warned:
        del window
        assert collect_until(lambda: len(warned) > 0)
    assert settled()


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("ucx", marks=pytest.mark.thorough)])
def test_peers_of_a_dropped_communicator_do_not_wait_for_it(backend: str) -> None:
    def body(comm: Communicator) -> str:
        part = comm.split([0, 1], timeout=2 * PATIENCE)
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
            said = type(error).__name__ if time.monotonic() - began < PATIENCE else f"late: {error}"
        comm.barrier()
        part.close()
        return said

    with LocalCluster(2, backend, timeout=4 * PATIENCE) as cluster:
        dropped, said = cluster.run(body)
    assert dropped == "dropped" and said in ("PeerFailed", "Revoked"), said


# -- a backend that closes its transport itself, after a communicator was made over it (`Context.meanwhile`)


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
    plugin = Plugin(connect)
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    comms.register(plugin)
    try:
        with contextlib.ExitStack() as stack:
            if not connects:
                stack.enter_context(pytest.raises(PeerFailed))
            store, peers = dist.HashStore(), [this_process()]
            connect_members("handing-over", KnownMembers(rank=0, peers=peers, store=store, epoch=0)).close()
        gc.collect()
        assert settled()
    finally:
        comms.unregister(plugin)
    assert not failures
    assert not [each for each in recwarn if issubclass(each.category, ResourceWarning)]


class Plugin:
    """A backend `handing-over` that connects by a given function."""

    def __init__(self, connect: Callable[[Context], InprocTransport]) -> None:
        self._info = dataclasses.replace(inproc.holdfast_backends()[0], name="handing-over", connect=connect)

    @hookimpl
    def holdfast_backends(self) -> list[BackendInfo]:
        return [self._info]
