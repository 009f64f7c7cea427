"""`HoldfastTensorTransport`: a memory plane as a transport of Ray's, for the tensors of actors. `register` adds it.

    register()                                        # in the driver, before the classes of the actors
    @ray.method(tensor_transport="holdfast")          # a method's tensors stay with its actor, and are read from there

A receiver reads the sender's memory while the sender does something else. The plane is `memory("auto")`: HOLDFAST_PLANE
names another one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.memory_plane import Handle, MemoryPlane, Region, memory
from holdfast.comms.quantities import time_left
from holdfast.comms.work import Work

NAME = "holdfast"
TIMEOUT = 300.0
"""Seconds after which a read of one tensor raises `OpTimeout`; Ray's own limits are shorter, or none."""


@dataclass
class TensorHandles(TensorTransportMetadata):  # type: ignore[misc]  # ray has no types for us
    """The shapes and types of an object's tensors, and the encoded handles of their memory."""

    handles: list[bytes] = field(default_factory=list)
    """Empty for a tensor without elements."""


@dataclass
class Reads(FetchRequest):  # type: ignore[misc]
    """Reads under way into `tensors`."""

    works: Sequence[Work] = ()


class HoldfastTensorTransport(TensorTransportManager):  # type: ignore[misc]
    """One of a process. Ray calls it from the actor's thread and from its own.

    A read of tensors that were freed, or whose actor died, raises `RegionGone`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, list[Region]] = {}

    def tensor_transport_backend(self) -> str:
        return NAME.upper()

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Whether a memory plane opens in the actor."""
        has_plane = actor.__ray_call__.options(concurrency_group="_ray_system").remote(_has_plane)
        return bool(ray.get(has_plane))

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> TensorHandles:
        """Expose the tensors. Raises ValueError if one is not contiguous, `Unsupported` for memory of another kind."""
        regions: list[Region] = []
        handles = list[bytes]()
        try:
            for tensor in rdt_object:
                if tensor.numel():
                    regions.append(_plane().expose(tensor.detach()))
                handles.append(regions[-1].handle.encode() if tensor.numel() else b"")
        except BaseException:
            _close(regions)
            raise
        with self._lock:
            self._regions.setdefault(obj_id, []).extend(regions)
        shapes = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        device = rdt_object[0].device.type if rdt_object else None
        return TensorHandles(tensor_meta=shapes, tensor_device=device, handles=handles)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorHandles,
        communicator_metadata: Any,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> Reads:
        """Begin to read the tensors, into `target_buffers` or new memory."""
        meta = tensor_transport_metadata
        into = target_buffers or [
            torch.empty(shape, dtype=dtype, device=meta.tensor_device) for shape, dtype in meta.tensor_meta
        ]
        works = [
            _plane(handle.plane).read(handle, tensor.detach(), timeout=TIMEOUT)
            for handle, tensor in zip(map(_decode, meta.handles), into, strict=True)
            if handle is not None
        ]
        return Reads(obj_id=obj_id, tensors=into, works=works)

    def wait_fetch_complete(self, fetch_request: Reads, timeout: float = -1) -> list[torch.Tensor]:
        """Wait for the reads. Raises their errors; a TimeoutError after `timeout` seconds, unless that is negative."""
        left = time_left(None if timeout < 0 else timeout)
        for work in fetch_request.works:
            work.wait(left())
        tensors: list[torch.Tensor] = fetch_request.tensors
        return tensors

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorHandles,
        communicator_metadata: Any,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        reads = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(reads)

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError("receivers read; nothing is sent")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[torch.Tensor]) -> None:
        """Stop exposing an object's tensors."""
        with self._lock:
            regions = self._regions.pop(obj_id, [])
        _close(regions)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Do nothing: a read ends by itself, by its timeout or when its sender is gone."""


def register() -> None:
    """Add the transport "holdfast" to Ray, for tensors of torch; before the classes of the actors that use it."""
    register_tensor_transport(NAME, ["cpu"], HoldfastTensorTransport, torch.Tensor)


@functools.cache
def _plane(name: str = "auto") -> MemoryPlane:
    """The plane of this process; open until it ends."""
    return memory(name)


def _has_plane(actor: object) -> bool:
    try:
        _plane()
    except BackendUnavailable:
        return False
    return True


def _decode(handle: bytes) -> Handle | None:
    return Handle.decode(handle) if handle else None


def _close(regions: Sequence[Region]) -> None:
    for region in regions:
        region.close()
