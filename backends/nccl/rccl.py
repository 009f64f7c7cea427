"""`rccl`: torch's own group over RCCL, between AMD GPUs. torch on ROCm calls it NCCL, and so does this code."""

from __future__ import annotations

from holdfast.backends.nccl.transport import HINTS, NcclTransport, capabilities, connect_over, probe_torch
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Unavailable, hookimpl
from holdfast.comms.transport.base import Context


def probe() -> Available | Unavailable:
    """Whether RCCL can run here."""
    return probe_torch("rccl")


def connect(context: Context) -> NcclTransport:
    """See `holdfast.backends.nccl.transport.connect_over`."""
    return connect_over(context, "rccl")


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="rccl",
            api=API_VERSION,
            description="torch's own group over RCCL, between AMD GPUs; no windows, no symmetric memory",
            capabilities=capabilities(),
            probe=probe,
            connect=connect,
            auto={"cuda": 90},
            hints=HINTS,
        )
    ]
