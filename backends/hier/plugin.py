"""What the hierarchical backends announce: what both of their transports can do, on the device of these."""

from __future__ import annotations

from functools import partial

from holdfast.backends.hier.choice import MEGABITS
from holdfast.comms.arithmetic import REDUCIBLE
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities, Unavailable, hookimpl
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context, Transport

LAYERS = {"ucx": ("shm", "cpu"), "gloo": ("shm", "cpu"), "nccl": ("nccl", "cuda")}
"""By the transport between hosts: that within a host (NCCL takes NVLink or shared memory there), and their device."""


def connect(inner: str, outer: str, context: Context) -> Transport:
    """See `holdfast.backends.hier.transport.connect`."""
    from holdfast.backends.hier.transport import connect

    return connect(inner, outer, context)


def probe(inner: str, outer: str) -> Available | Unavailable:
    """Whether both transports can run here."""
    details = []
    for name in (inner, outer):
        status = registry().backend(name).status
        if isinstance(status, Unavailable):
            return Unavailable(f"{name}: {status.reason}", status.install_hint)
        details.append(f"{name} ({status.detail})" if status.detail else name)
    return Available(" within a host, ".join(details) + " between hosts")


def prepare(outer: str) -> None:
    """Prepare the transport between hosts."""
    if (prepare_outer := registry().backend(outer).info.prepare) is not None:
        prepare_outer()


def layered(inner: str, outer: str, device: str, *, windows: bool = False) -> BackendInfo:
    """The backend `hier-OUTER`: `inner` within a host, `outer` between hosts, for tensors of a device.

    Its windows are those of `outer` over all ranks, if that has them.
    """
    return BackendInfo(
        name=f"hier-{outer}",
        api=API_VERSION,
        description=f"{inner} within a host, {outer} between hosts: hierarchical collectives",
        capabilities=Capabilities(
            reduces={device: names(REDUCIBLE)},
            moves={device: names(DTYPES)},
            windows=windows,
            atomics=windows,
            passive_target="thread" if windows else "",
        ),
        probe=partial(probe, inner, outer),
        connect=partial(connect, inner, outer),
        prepare=partial(prepare, outer),
        hints=(MEGABITS,),
    )


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [layered(inner, outer, device, windows=device == "cpu") for outer, (inner, device) in LAYERS.items()]
