"""Versioned weights, kept in the memory of several processes, so that they outlive any one of them."""

from holdfast.store.async_weight_store import AsyncFollower, AsyncLease, AsyncWeightStore
from holdfast.store.catalog.records import Holder, Reader
from holdfast.store.errors import (
    CallCancelled,
    CorruptVersion,
    NoSuchVersion,
    NotCaughtUp,
    ReaderReplaced,
    StoreFull,
    StoreTimeout,
)
from holdfast.store.follow.follower import Follower
from holdfast.store.follow.switch import SwitchResult
from holdfast.store.read.version_reader import Slice
from holdfast.store.reshard.name_map import Component, Layout, NameRule
from holdfast.store.weight_store import Lease, WeightStore

__all__ = [
    "AsyncFollower",
    "AsyncLease",
    "AsyncWeightStore",
    "CallCancelled",
    "Component",
    "CorruptVersion",
    "Follower",
    "Holder",
    "Layout",
    "Lease",
    "NameRule",
    "NoSuchVersion",
    "NotCaughtUp",
    "Reader",
    "ReaderReplaced",
    "Slice",
    "StoreFull",
    "StoreTimeout",
    "SwitchResult",
    "WeightStore",
]
