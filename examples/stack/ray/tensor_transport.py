"""A memory plane as a tensor transport of Ray's; `register` adds it. A receiver reads the sender's memory.

The plane is `memory("auto")`: HOLDFAST_PLANE names another one.
"""

import functools
import threading
import time
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

from holdfast import comms

TIMEOUT = 300.0
"""Seconds after which a read of one tensor raises `OpTimeout`; Ray's own limits are shorter, or none."""


@dataclass
class TensorHandles(TensorTransportMetadata):  # type: ignore[misc]  # ray has no types for us
    handles: list[bytes] = field(default_factory=list)
    """The encoded handles of an object's tensors; empty for a tensor without elements."""


@dataclass
class Reads(FetchRequest):  # type: ignore[misc]
    works: Sequence[comms.Work] = ()


class HoldfastTensorTransport(TensorTransportManager):  # type: ignore[misc]
    """One of a process. Ray calls it from the actor's thread and from its own.

    A read of tensors that were freed, or whose actor died, raises `RegionGone`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, list[comms.Region | None]] = {}

    def tensor_transport_backend(self) -> str:
        return "HOLDFAST"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return bool(ray.get(actor.__ray_call__.options(concurrency_group="_ray_system").remote(_has_plane)))

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> TensorHandles:
        """Expose the tensors, which must be contiguous."""
        regions: list[comms.Region | None] = []
        try:
            regions += (_plane().expose(each.detach()) if each.numel() else None for each in rdt_object)
        except BaseException:
            _close(regions)
            raise
        with self._lock:
            self._regions.setdefault(obj_id, []).extend(regions)
        return TensorHandles(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device=rdt_object[0].device.type if rdt_object else None,
            handles=[region.handle.encode() if region else b"" for region in regions],
        )

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    def fetch_multiple_tensors(
        self, obj_id: str, meta: TensorHandles, communicator: Any, target_buffers: list[torch.Tensor] | None = None
    ) -> Reads:
        """Begin to read the tensors, into `target_buffers` or new memory."""
        into = target_buffers or [
            torch.empty(shape, dtype=dtype, device=meta.tensor_device) for shape, dtype in meta.tensor_meta
        ]
        decoded = [comms.Handle.decode(handle) if handle else None for handle in meta.handles]
        works = [
            _plane(handle.plane).read(handle, tensor.detach(), timeout=TIMEOUT)
            for handle, tensor in zip(decoded, into, strict=True)
            if handle is not None
        ]
        return Reads(obj_id=obj_id, tensors=into, works=works)

    def wait_fetch_complete(self, fetch_request: Reads, timeout: float = -1) -> list[torch.Tensor]:
        deadline = time.monotonic() + timeout
        for work in fetch_request.works:
            work.wait(None if timeout < 0 else max(deadline - time.monotonic(), 0.0))
        return fetch_request.tensors

    def recv_multiple_tensors(self, *arguments: Any, **named: Any) -> list[torch.Tensor]:
        return self.wait_fetch_complete(self.fetch_multiple_tensors(*arguments, **named))

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError("receivers read; nothing is sent")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[torch.Tensor]) -> None:
        with self._lock:
            regions = self._regions.pop(obj_id, [])
        _close(regions)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Do nothing: a read ends by itself, by its timeout or when its sender is gone."""


def register() -> None:
    """Add the transport "holdfast", in the driver, before the classes of the actors that use it."""
    register_tensor_transport("holdfast", ["cpu"], HoldfastTensorTransport, torch.Tensor)


@functools.cache
def _plane(name: str = "auto") -> comms.MemoryPlane:
    """The plane of this process; open until it ends."""
    return comms.memory(name)


def _has_plane(actor: object) -> bool:
    try:
        _plane()
    except comms.BackendUnavailable:
        return False
    return True


def _close(regions: Sequence[comms.Region | None]) -> None:
    for region in filter(None, regions):
        region.close()
