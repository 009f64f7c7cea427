"""`rccl`: torch's own group over RCCL, between AMD GPUs. torch on ROCm calls it NCCL, and so does this code."""

from __future__ import annotations

from holdfast.backends.nccl.transport import backend
from holdfast.comms.plugins.spec import BackendInfo, hookimpl


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [backend("rccl", "AMD", 90)]
