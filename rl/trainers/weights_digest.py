"""A digest of weights, to compare whole models by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash


def weights_digest(state: Mapping[str, Any]) -> str:
    """32 hexadecimal digits that depend on every bit of a state dict of tensors; collective if they are sharded."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(state.items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode())
        digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
