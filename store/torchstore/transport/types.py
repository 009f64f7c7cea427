"""The names of torchstore's module `transport.types`."""

from holdfast.store.torchstore.access.request import Request
from holdfast.store.torchstore.tensor_slice import TensorSlice

__all__ = ["Request", "TensorSlice"]
