"""The capabilities of the `ucx` backend, and whether it can run here."""

from __future__ import annotations

import threading

from holdfast.comms.algorithms.message_passing.cost import ALGORITHM
from holdfast.comms.arithmetic import REDUCIBLE
from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.comms.plugins.spec import (
    API_VERSION,
    Available,
    BackendInfo,
    Capabilities,
    Unavailable,
    hookimpl,
    refused,
)
from holdfast.comms.system import forks
from holdfast.comms.system.signal_safety import run_shielded
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context, Link, Transport

_prepared = False


@forks.run_in_children
def _begin_child() -> None:
    """Reset the loader in a forked child: the parent may have been in the middle of loading."""
    global _prepared
    _prepared = False


def connect(context: Context) -> Transport:
    """See `holdfast.backends.ucx.handshake.connect`."""
    from holdfast.backends.ucx.handshake import connect

    return connect(context)


def prepare() -> None:
    """Begin to load the modules that connecting needs. A spare does so ahead of time."""
    global _prepared
    if not _prepared:
        _prepared = True
        run_shielded(threading.Thread(target=_load, name="holdfast-ucx-start").start)


def _load() -> None:
    from holdfast.backends.ucx import handshake  # noqa: F401  # to import it is half of the work
    from holdfast.backends.ucx.endpoints import warm_up

    warm_up()


def memory() -> MemoryPlane:
    """See `holdfast.backends.ucx.memory_plane`."""
    from holdfast.backends.ucx.memory_plane import UcxPlane

    return UcxPlane()


def probe() -> Available | Unavailable:
    """Whether libucp can be loaded and the processes of peers can be watched: UCX does not report their ends."""
    from holdfast.backends.ucx.libucp import library

    if (wrong := refused("pidfd_open")) is not None:
        return wrong
    try:
        return Available(f"UCX {library().version}")
    except BackendUnavailable as error:
        return Unavailable(error.reason, error.install_hint)


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="ucx",
            api=API_VERSION,
            description="libucp: shared memory on one host, TCP between hosts, or what UCX_TLS says",
            capabilities=Capabilities(
                reduces={"cpu": names(REDUCIBLE)},
                moves={"cpu": names(DTYPES)},
                windows=True,
                atomics=True,
                memory_plane=True,
                passive_target="thread",
                tcp="UCX_TLS",
            ),
            probe=probe,
            connect=connect,
            memory=memory,
            prepare=prepare,
            hints=(ALGORITHM,),
            links=(Link(3e-6, 8e9, "ucx/shm"), Link(25e-6, 1.5e9, "ucx/tcp")),
        )
    ]
