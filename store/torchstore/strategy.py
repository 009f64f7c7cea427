"""The names of torchstore's module `strategy`."""

from holdfast.store.torchstore.strategies import (
    ControllerStorageVolumes,
    HostStrategy,
    LocalRankStrategy,
    TorchStoreStrategy,
)

__all__ = ["ControllerStorageVolumes", "HostStrategy", "LocalRankStrategy", "TorchStoreStrategy"]
