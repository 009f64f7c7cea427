"""Versioned weights, kept in the memory of several processes, so that they outlive any one of them."""

from holdfast.store.catalog import Holder
from holdfast.store.errors import NoSuchVersion, StoreTimeout
from holdfast.store.store import Lease, WeightStore

__all__ = ["Holder", "Lease", "NoSuchVersion", "StoreTimeout", "WeightStore"]
