"""Copies from and to CUDA devices through pinned memory, on a stream of their own: training is not delayed."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors on CUDA devices in pinned memory of the host.

    A copy begins when the work of the current stream that is queued so far is done, and does not delay what is queued
    later. Only the calling thread waits.
    """
    copies = []
    for tensor in tensors:
        with torch.cuda.device(tensor.device):
            stream = _stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                copies.append(pinned.copy_(tensor, non_blocking=True))
                tensor.record_stream(stream)
    for device in {tensor.device for tensor in tensors}:
        _stream(device).synchronize()
    return copies


def to_device(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors of the host into tensors on CUDA devices; returns when they are there.

    The current streams of the devices wait for the copies, so what is queued later sees the new elements.
    """
    for source, target in zip(sources, targets, strict=True):
        with torch.cuda.device(target.device):
            stream, current = _stream(target.device), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                pinned = source.pin_memory()  # itself, if it is pinned already
                target.copy_(pinned, non_blocking=True)
                target.record_stream(stream)
            current.wait_stream(stream)
    for device in {target.device for target in targets}:
        _stream(device).synchronize()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process for copies of the store."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
