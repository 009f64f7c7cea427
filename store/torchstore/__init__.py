"""torchstore's interface over the weight store's parts: `import holdfast.store.torchstore as ts`.

Code written for torchstore runs unchanged inside Monarch actors and under torchrun; Monarch itself is not needed. What
differs is listed in docs/reference/torchstore.md.
"""

from holdfast.store.torchstore import spmd
from holdfast.store.torchstore.api import (
    client,
    delete,
    delete_batch,
    exists,
    get,
    get_batch,
    initialize,
    keys,
    put,
    put_batch,
    reset_client,
    shutdown,
)
from holdfast.store.torchstore.state_dict_utils import get_state_dict, put_state_dict
from holdfast.store.torchstore.strategy import (
    ControllerStorageVolumes,
    HostStrategy,
    LocalRankStrategy,
    TorchStoreStrategy,
    TransportType,
)
from holdfast.store.torchstore.transport import TensorSlice
from holdfast.store.torchstore.utils import init_logging

initialize_spmd = spmd.initialize

__all__ = [
    "ControllerStorageVolumes",
    "HostStrategy",
    "LocalRankStrategy",
    "TensorSlice",
    "TorchStoreStrategy",
    "TransportType",
    "client",
    "delete",
    "delete_batch",
    "exists",
    "get",
    "get_batch",
    "get_state_dict",
    "init_logging",
    "initialize",
    "initialize_spmd",
    "keys",
    "put",
    "put_batch",
    "put_state_dict",
    "reset_client",
    "shutdown",
    "spmd",
]
