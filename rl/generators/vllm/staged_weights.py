"""The weights of one worker of vLLM, in vLLM's names and shapes, as they come from the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.store import Layout, WeightStore

Tensor = torch.Tensor


class StagedWeights:
    """Tensors like the parameters of tensor-parallel rank `rank` of `size`, which versions are read into.

    `parameters` may be on the meta device. `config` is the model's, as transformers has it. vLLM's joined tensors
    (qkv_proj, gate_up_proj) are filled in place from those of the publisher; of each, this rank's slice alone is read.
    What a version does not fill, the padding of the vocabulary, is zero. Raises `Unsupported` for models with
    unknown names in vLLM, and ValueError for heads that `size` ranks cannot share.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: Any, rank: int = 0, size: int = 1) -> None:
        self._layout = Layout.vllm(config, rank, size)
        self.tensors = {
            name: torch.zeros(each.shape, dtype=each.dtype, device="cpu") for name, each in parameters.items()
        }

    def pull(self, store: WeightStore, version: int, timeout: float) -> None:
        """Read a version. After an error the tensors may hold a mixture. Raises the errors of `WeightStore.get`."""
        store.get(version, self.tensors, layout=self._layout, timeout=timeout)
