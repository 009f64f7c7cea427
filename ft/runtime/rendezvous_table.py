"""Where the members of an epoch meet to build its communicator, without round trips.

The first member has the table. Whatever is set in it is pushed to all others at once, so that they wait and read at
home; only what they set themselves they ask of the first member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.ft.control import kv

OnChange = Callable[[int, tuple[str, ...]], None]


class SharedTable(kv.KeyValue):
    """A table that tells of what is set in it: `on_change(epoch, keys)`, in the thread that sets it.

    It does not tell the values: threads that set one key may tell of it in another order than they set it. Read the
    newest by `values` in the one thread that sends them, so that nobody is sent an older value after a newer one.
    """

    def __init__(self, on_change: OnChange) -> None:
        super().__init__()
        self._on_change = on_change

    def put(self, epoch: int, items: Mapping[str, bytes]) -> None:
        super().put(epoch, items)
        self._on_change(epoch, tuple(items))

    def add(self, epoch: int, key: str, amount: int) -> int:
        total = super().add(epoch, key, amount)
        self._on_change(epoch, (key,))
        return total

    def append(self, epoch: int, key: str, value: bytes) -> None:
        super().append(epoch, key, value)
        self._on_change(epoch, (key,))

    def compare_set(self, epoch: int, key: str, expected: bytes, desired: bytes) -> bytes:
        found = super().compare_set(epoch, key, expected, desired)
        if found == desired:
            self._on_change(epoch, (key,))
        return found

    def values(self, epoch: int, keys: Iterable[str]) -> dict[str, bytes]:
        """What these keys hold now, those of them that are there. Raises `Revoked`."""
        held = self.items(epoch)
        return {key: held[key] for key in keys if key in held}

    def receive(self, epoch: int, items: Mapping[str, bytes]) -> None:
        """Take in what the first member pushes."""
        super().put(epoch, items)


class Replica:
    """The table as members other than the first use it: they read `near` and write `far`."""

    def __init__(self, near: kv.KeyValue, far: kv.Table) -> None:
        self._near, self._far = near, far

    def put(self, epoch: int, items: Mapping[str, bytes]) -> None:
        self._far.put(epoch, items)

    def fetch(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        return self._near.fetch(epoch, keys, timeout)

    def wait(self, epoch: int, keys: Sequence[str], timeout: float) -> None:
        self._near.wait(epoch, keys, timeout)

    def add(self, epoch: int, key: str, amount: int) -> int:
        return self._far.add(epoch, key, amount)

    def append(self, epoch: int, key: str, value: bytes) -> None:
        self._far.append(epoch, key, value)

    def compare_set(self, epoch: int, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._far.compare_set(epoch, key, expected, desired)

    def check(self, epoch: int, keys: Sequence[str]) -> bool:
        return self._far.check(epoch, keys)

    def delete(self, epoch: int, key: str) -> bool:
        return self._far.delete(epoch, key)

    def count(self, epoch: int) -> int:
        return self._far.count(epoch)
