"""The compiled part of windows on one host (backends/ucx/onesided/near.c). Everything is an address or a number."""

CLOSED: int
BLOCK: int
"""Bytes that are copied at once; between two looks at the deadline."""

class Near:
    """A worker, and the addresses of libucp's functions."""

    def __init__(
        self, *, get: int, put: int, progress: int, status: int, free: int, worker: int, param: int
    ) -> None: ...

class NearPart:
    """The memory of one rank. A caller holds the worker's lock.

    `closed` is the address of a word of this process that is not 0 once that rank has closed its window, `busy` of a
    word of that rank's that is 1 while this one writes.
    """

    def __init__(self, near: Near, *, endpoint: int, memory: int, key: int, closed: int, busy: int) -> None: ...
    def get(self, address: int, nbytes: int, offset: int, /) -> int:
        """A block of that, at most: 0 if it is done; else the request, which is under way, or a negative status."""

    def put(self, address: int, nbytes: int, offset: int, /) -> int:
        """The same, or CLOSED, and nothing is put. A request or a negative status leaves the word `busy` at 1."""

    def put_entered(self, address: int, nbytes: int, offset: int, /) -> int:
        """The same for a caller that has set the word `busy` itself."""
