"""The compiled part of windows on one host (backends/ucx/native/near.c). Everything is an address or a number."""

CLOSED: int

class Near:
    """Gets and puts over a worker, by the addresses of libucp's functions. The caller holds the worker's lock."""

    def __init__(
        self, *, get: int, put: int, progress: int, status: int, free: int, worker: int, param: int
    ) -> None: ...
    def get(self, endpoint: int, address: int, nbytes: int, remote: int, key: int, /) -> int:
        """0 if it is done; else the request, which is under way, or a negative status."""

    def put(self, endpoint: int, address: int, nbytes: int, remote: int, key: int, busy: int, closed: int, /) -> int:
        """The same, after the word at `busy` was set to 1; CLOSED, and nothing is put, if the word at `closed` is not 0
        then.
        """
