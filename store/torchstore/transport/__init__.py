"""The names of torchstore's package `transport`."""

from holdfast.store.torchstore.access.request import Request
from holdfast.store.torchstore.strategies import TransportType
from holdfast.store.torchstore.tensor_slice import TensorSlice

__all__ = ["Request", "TensorSlice", "TransportType"]
