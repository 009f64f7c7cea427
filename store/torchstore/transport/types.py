"""The names of torchstore's module `transport.types`."""

from holdfast.store.torchstore.request import Request, TensorSlice

__all__ = ["Request", "TensorSlice"]
