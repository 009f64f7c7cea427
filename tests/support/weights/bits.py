"""Comparisons of tensors bit by bit."""

from __future__ import annotations

import torch

from holdfast.store import WeightStore


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def content(store: WeightStore, version: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a version, read into tensors like those given."""
    into = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    store.get(version, into)
    return into
