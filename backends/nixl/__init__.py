"""`nixl`: a memory plane over NVIDIA's NIXL, which moves memory through UCX here and through more elsewhere."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from holdfast.comms.memory_plane import MemoryPlane
from holdfast.comms.plugins.kernel_calls import refused
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities, Unavailable, hookimpl

HINT = "pip install --no-deps nixl nixl-cu12 (nixl alone would bring all of CUDA)"


def memory() -> MemoryPlane:
    """See `holdfast.backends.nixl.plane.open_plane`."""
    from holdfast.backends.nixl.plane import open_plane

    return open_plane()


def probe() -> Available | Unavailable:
    """Whether NIXL and its library for some kind of device are installed."""
    if importlib.util.find_spec("nixl") is None:
        return Unavailable("nixl is not installed", HINT)
    if not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13", "nixl_rocm")):
        return Unavailable("nixl is installed without the library that does its work", HINT)
    if (wrong := refused("pidfd_open")) is not None:
        return wrong
    return Available(f"NIXL {importlib.metadata.version('nixl')}")


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="nixl",
            api=API_VERSION,
            description="memory plane over NVIDIA's NIXL: shared memory on one host, TCP, or what UCX_TLS says",
            capabilities=Capabilities(
                collectives=frozenset(), memory_plane=True, passive_target="thread", abortable=False
            ),
            probe=probe,
            connect=None,
            memory=memory,
        )
    ]
