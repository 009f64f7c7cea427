"""`nixl`: a memory plane over NVIDIA's NIXL, which moves memory through UCX here and through more elsewhere."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

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

_LIBRARIES = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
"""The packages one of which does the work of `nixl`; it takes that of torch's CUDA, or any if torch has none."""


def memory() -> MemoryPlane:
    """See `holdfast.backends.nixl.plane`."""
    from holdfast.backends.nixl.plane import NixlPlane

    return NixlPlane()


def probe() -> Available | Unavailable:
    """Whether NIXL and the library that it loads beside this torch are installed."""
    cuda = torch.version.cuda
    libraries = _LIBRARIES if cuda is None else (f"nixl_cu{cuda.partition('.')[0]}",)
    package = libraries[0].replace("_", "-")
    hint = f"pip install --no-deps nixl {package} (nixl alone would bring all of CUDA)"
    if importlib.util.find_spec("nixl") is None:
        return Unavailable("nixl is not installed", hint)
    if not any(importlib.util.find_spec(name) for name in libraries):
        return Unavailable(f"nixl is installed without the library that does its work ({package})", hint)
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
