"""vLLM's weight-transfer engine "holdfast": each worker reads its own part of a version from the store.

A version is read whole into tensors beside the model before the model is touched. On a CPU vLLM repacks the weights of
its layers, so they cannot be written in place: they go through its layerwise reload, with loaders that take tensors
which are joined and sliced already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from holdfast.store import Layout, WeightStore


@dataclass
class StoreInit(WeightTransferInitInfo):  # type: ignore[misc]
    """`url` is that of the store."""

    url: str


@dataclass
class StoreUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to read, and the limit of that in seconds."""

    version: int
    timeout: float


class StoreWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Implements `WeightTransferEngine`. `update_weights` does it all: a start and an end have nothing to undo."""

    init_info_cls, update_info_cls = StoreInit, StoreUpdate
    supports_draft_weight_update = False

    _store: WeightStore | None = None
    _layout: Layout
    _staged: dict[str, torch.Tensor]
    """The weights of this worker, in vLLM's names and shapes. The padding of the vocabulary is zero."""

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        """Open the store, and make room for the weights."""
        parameters = dict(_parameters(self.model))
        for each in parameters.values():
            each.weight_loader = _copy_whole
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self._layout = Layout.vllm(self.model_config.hf_text_config, rank, size)
        self._staged = {
            name: torch.zeros(each.shape, dtype=each.dtype, device="cpu") for name, each in parameters.items()
        }
        self._store = WeightStore(init_info.url, hold=False)

    def start_weight_update(self) -> None:
        """Nothing to do."""

    def finish_weight_update(self) -> None:
        """Nothing to do."""

    def receive_weights(self, update_info: StoreUpdate) -> None:
        """Read the version, then load it into the model. After an error in the latter, only a whole update helps."""
        assert self._store is not None
        self._store.get(update_info.version, self._staged, layout=self._layout, timeout=update_info.timeout)
        initialize_layerwise_reload(self.model)
        try:
            for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
                if name in self._staged:
                    parameter.weight_loader(parameter, self._staged[name])
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `receive_weights`; returns once the device has the weights."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Leave the store. Idempotent."""
        if self._store is not None:
            self._store.close()


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The parameters as they are before vLLM repacks them: what it recorded of each layer, and biases, which stay."""
    for prefix, layer in model.named_modules():
        recorded, _ = get_layerwise_info(layer).restore_metadata
        bias = layer._parameters.get("bias")
        for name, each in (recorded if bias is None else {**recorded, "bias": bias}).items():
            yield f"{prefix}.{name}" if prefix else name, each


def _copy_whole(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """The loader of parameters that come as this worker has them."""
    param.data.copy_(loaded_weight)
