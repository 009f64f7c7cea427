"""The names of torchstore's package `transport`."""

from holdfast.store.torchstore.request import Request, TensorSlice
from holdfast.store.torchstore.strategy import TransportType

__all__ = ["Request", "TensorSlice", "TransportType"]
