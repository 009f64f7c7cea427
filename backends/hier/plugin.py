"""What the hierarchical backends announce: what both of their transports can do, on CPU tensors."""

from __future__ import annotations

from functools import partial

from holdfast.comms.arithmetic import REDUCIBLE
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities, Unavailable, hookimpl
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context, Transport

INNER = "shm"
OUTERS = ("ucx", "gloo")


def connect(outer: str, context: Context) -> Transport:
    """See `holdfast.backends.hier.transport.connect`."""
    from holdfast.backends.hier.transport import connect

    return connect(INNER, outer, context)


def probe(outer: str) -> Available | Unavailable:
    """Whether both transports can run here."""
    details = []
    for name in (INNER, outer):
        status = registry().backend(name).status
        if isinstance(status, Unavailable):
            return Unavailable(f"{name}: {status.reason}", status.install_hint)
        details.append(f"{name} ({status.detail})" if status.detail else name)
    return Available(" within a host, ".join(details) + " between hosts")


def prepare(outer: str) -> None:
    """Prepare the transport between hosts."""
    if (prepare_outer := registry().backend(outer).info.prepare) is not None:
        prepare_outer()


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name=f"hier-{outer}",
            api=API_VERSION,
            description=f"{INNER} within a host, {outer} between hosts: hierarchical collectives",
            capabilities=Capabilities(reduces={"cpu": names(REDUCIBLE)}, moves={"cpu": names(DTYPES)}),
            probe=partial(probe, outer),
            connect=partial(connect, outer),
            prepare=partial(prepare, outer),
        )
        for outer in OUTERS
    ]
