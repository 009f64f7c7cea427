"""What the `ucx` backend offers, and whether it can run here."""

from __future__ import annotations

import threading

from holdfast.comms import forks
from holdfast.comms.algorithms.arithmetic import REDUCIBLE
from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.kernel_calls import refused
from holdfast.comms.plane import MemoryPlane
from holdfast.comms.plugins import (
    API_VERSION,
    Available,
    BackendInfo,
    Capabilities,
    Unavailable,
    hookimpl,
)
from holdfast.comms.tensors import DTYPES, names
from holdfast.comms.transport import Context, Transport

_prepared = False


@forks.in_child
def _begin_child() -> None:
    """A forked child has to load again what its parent had half loaded."""
    global _prepared
    _prepared = False


def connect(context: Context) -> Transport:
    """See `holdfast.backends.ucx.meeting.connect`."""
    from holdfast.backends.ucx.meeting import connect

    return connect(context)


def prepare() -> None:
    """Begin to load what connecting takes. A spare has the time for that now, and not when it is needed."""
    global _prepared
    if not _prepared:
        _prepared = True
        threading.Thread(target=_load, name="holdfast-ucx-start").start()


def _load() -> None:
    from holdfast.backends.ucx import (
        meeting,  # noqa: F401  # to import it is half of the work
        standby,
    )

    standby.rehearse()


def memory() -> MemoryPlane:
    """See `holdfast.backends.ucx.memory.open_plane`."""
    from holdfast.backends.ucx.memory import open_plane

    return open_plane()


def probe() -> Available | Unavailable:
    """Whether libucp can be loaded, and peers' processes be watched: UCX does not tell of their ends."""
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
        )
    ]
