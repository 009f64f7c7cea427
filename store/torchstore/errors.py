"""The errors of torchstore's interface. Each is also the builtin error that code written for torchstore expects."""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError, Mismatch, Unsupported


class NoSuchKey(HoldfastError, KeyError):
    """Keys that are not in the store, or of which some shards were not put yet."""

    def __str__(self) -> str:
        return str(self.args[0])


class NotInitialized(HoldfastError):
    """No store of this name can be found from this process, or it was shut down."""

    def __init__(self, store_name: str, why: str) -> None:
        self.store_name = store_name
        super().__init__(f"store {store_name!r}: {why}; call initialize() in this process or in one that starts it")


class NoSuchSlice(Mismatch):
    """A slice, or a tensor to fill, that the stored tensor does not cover."""


class ObjectRefused(Unsupported, TypeError):
    """An object that cannot be stored, because it would have to be pickled."""

    def __init__(self, key: str, why: str) -> None:
        self.key = key
        hint = "put dicts, lists, tuples, sets, numbers, text, bytes, None and tensors; they are never pickled"
        super().__init__(f"putting {key!r}: {why}", hint)
