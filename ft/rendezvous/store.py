"""A rendezvous table as the `torch.distributed.Store` that backends are built with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from holdfast.ft.rendezvous.calls import RendezvousClient
from holdfast.ft.rendezvous.table import RendezvousTable


class RendezvousStore(dist.Store):
    """One epoch of a rendezvous table as a `torch.distributed.Store`; `PrefixStore` and every backend can use it.

    `table` is the table itself in the process that serves it, and a client in the others. `delete` removes a key from
    all copies of the table (default: `table.delete`). The methods have the names that torch calls; `timeout` (seconds)
    bounds those that wait.
    """

    def __init__(
        self,
        table: RendezvousTable | RendezvousClient,
        epoch: int,
        timeout: float = 30.0,
        delete: Callable[[int, str], bool] | None = None,
    ) -> None:
        super().__init__()
        self._table, self._epoch, self._delete = table, epoch, delete or table.delete
        self.set_timeout(timedelta(seconds=timeout))

    def _seconds(self, timeout: timedelta | None = None) -> float:
        wait: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        return wait.total_seconds()

    def clone(self) -> RendezvousStore:
        return RendezvousStore(self._table, self._epoch, self._seconds(), self._delete)

    def set(self, key: str, value: str | bytes) -> None:
        self._table.put(self._epoch, {key: _bytes(value)})

    def get(self, key: str) -> bytes:
        return self._table.fetch(self._epoch, [key], self._seconds())[0]

    def add(self, key: str, value: int) -> int:
        return self._table.add(self._epoch, key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._table.check(self._epoch, keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._table.wait(self._epoch, keys, self._seconds(timeout))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._table.compare_set(self._epoch, key, _bytes(expected_value), _bytes(desired_value))

    def delete_key(self, key: str) -> bool:
        return self._delete(self._epoch, key)

    def num_keys(self) -> int:
        return self._table.count(self._epoch)

    def append(self, key: str, value: str | bytes) -> None:
        self._table.append(self._epoch, key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._table.fetch(self._epoch, keys, self._seconds())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._table.put(self._epoch, dict(zip(keys, map(_bytes, values), strict=True)))

    def has_extended_api(self) -> bool:
        return True

    deleteKey = delete_key  # noqa: N815  (torch's C++ side calls these two under their C++ names)
    getNumKeys = num_keys  # noqa: N815


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
