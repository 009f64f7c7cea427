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

from holdfast.backends.inproc import transport as inproc
from holdfast.backends.inproc.transport import InprocTransport
from holdfast.comms import Communicator, PeerFailed, Revoked
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.comms.plugins.spec import BackendInfo, hookimpl
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import this_process
from support.comms.meeting import alone, registered
from support.comms.ranks import on_ranks, second_tier
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
    comm = alone(tmp_path)
    comm.all_reduce(torch.ones(2), async_op=True).wait()
    gone = weakref.ref(comm)
    with pytest.warns(ResourceWarning, match="Communicator 'default'.* was not closed") as warned:
        del comm
        # The thread of another communicator may collect it: it is gone a moment before it warns.
        assert collect_until(lambda: gone() is None and len(warned) > 0)
    assert settled()


def test_dropping_a_closed_communicator_does_not_warn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    alone(tmp_path).close()
    gc.collect()
    assert not [each for each in recwarn if each.category is ResourceWarning and "closed" in str(each.message)]


def test_an_asynchronous_op_of_a_dropped_communicator_still_completes(tmp_path: Path) -> None:
    with pytest.warns(ResourceWarning, match="was not closed") as warned:
        work = alone(tmp_path).all_reduce(torch.ones(2), async_op=True)
        assert collect_until(lambda: len(warned) > 0)
    work.wait(10.0)
    assert settled()


def test_a_window_keeps_its_communicator_alive(tmp_path: Path) -> None:
    window = alone(tmp_path).window(torch.zeros(4))
    gc.collect()
    window.put(torch.ones(1), 0)
    with pytest.warns(ResourceWarning, match="was not closed") as warned:
        del window
        assert collect_until(lambda: len(warned) > 0)
    assert settled()


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
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    members = KnownMembers(rank=0, peers=[this_process()], store=dist.HashStore(), epoch=0)
    with registered(Plugin(connect)):
        with contextlib.nullcontext() if connects else pytest.raises(PeerFailed):
            connect_members("handing-over", members).close()
        gc.collect()
        assert settled()
    assert not failures
    assert not [each for each in recwarn if issubclass(each.category, ResourceWarning)]


class Plugin:
    """A backend `handing-over` that connects by a given function."""

    def __init__(self, connect: Callable[[Context], InprocTransport]) -> None:
        self._info = dataclasses.replace(inproc.holdfast_backends()[0], name="handing-over", connect=connect)

    @hookimpl
    def holdfast_backends(self) -> list[BackendInfo]:
        return [self._info]
