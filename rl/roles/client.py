"""A worker's side of the calls to the driver."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.comms.errors import HoldfastError, OpTimeout
from holdfast.ft.control.client import RpcClient
from holdfast.ft.control.errors import ConnectionLost
from holdfast.rl.crew import Site
from holdfast.rl.roles import wire
from holdfast.rl.units import Unit

_LONG = 3600.0


class DriverGone(HoldfastError):
    """The driver's process is gone or has ended the run. It is no failure of a peer: the worker must end."""


class DriverClient:
    """The connection of the worker named `worker` to the driver of the run at `site`. A context manager.

    Calls raise `DriverGone`, and `RemoteError` if the driver refuses.
    """

    def __init__(self, site: Site, worker: str) -> None:
        self._rpc = RpcClient(site.address, key=site.key, job=site.job, identity=worker)
        self._faults = frozenset(site.faults)

    def warmed(self, untrained: float, loss: float) -> None:
        """Report the result of the warm-up."""
        self._call("warmed", wire.encode(wire.Warmed(untrained, loss)))

    def work(self, done: Unit | None = None, result: bytes = b"") -> wire.WorkReply:
        """Send the result of the unit that is done, and get the next unit."""
        return wire.decode(self._call("work", wire.encode(wire.WorkRequest(done, result))), wire.WorkReply)

    def take(self, request: wire.TakeRequest, check: Callable[[], None], timeout: float) -> tuple[bytes, ...]:
        """Wait for the samples and return them. Calls `check` repeatedly, which may raise to end the wait.

        Raises `OpTimeout` after `timeout` seconds.
        """
        began, body = time.monotonic(), wire.encode(request)
        while True:
            samples = wire.decode(self._call("take", body), wire.TakeReply).samples
            if samples is not None:
                return samples
            check()
            if (waited := time.monotonic() - began) > timeout:
                raise OpTimeout(f"take of the samples of step {request.step}", request.step, waited)

    def reach(self, point: str, step: int) -> None:
        """Report that this worker is at a point where a fault may be planned; free if none is."""
        if (point, step) in self._faults:
            self._call("reached", wire.encode(wire.Reached(point, step)))

    def finished(self, finished: wire.Finished) -> None:
        """Report that all steps are committed."""
        self._call("finished", wire.encode(finished))

    def stay(self) -> None:
        """Wait until the run is over, for an hour at most."""
        self._call("stay", timeout=_LONG)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._rpc.close()

    def _call(self, method: str, body: bytes = b"", timeout: float = 30.0) -> bytes:
        try:
            return self._rpc.call(method, body, timeout)
        except ConnectionLost as error:
            raise DriverGone(f"{method}: {error}") from error

    def __enter__(self) -> DriverClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
