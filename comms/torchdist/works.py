"""`TorchWork`: torch's handles of ops (`Work`, `Future`) over holdfast's `Work`."""

from __future__ import annotations

import threading
import types
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.quantities import time_left
from holdfast.comms.torchdist.calls import seconds
from holdfast.comms.work import Work

C = TypeVar("C", bound=type)


def untraced(cls: C) -> C:
    """Let dynamo run the methods of a class, and all that they call, uncompiled.

    DDP calls them from C++ within a compiled forward pass, and dynamo fails at fields of process groups. Equal to
    `torch.compiler.disable`, without its import of 1.7 s.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for member in vars(cls).values():
        if isinstance(member, types.FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, skip)
    return cls


Tensor = torch.Tensor
Future = torch.futures.Future
Filled = Sequence[Tensor] | Sequence[Sequence[Tensor]]


@untraced
class TorchWork(dist.Work):
    """torch's Work for one op, or for several that torch treats as one.

    `result()` is the tensors that it fills: a list; a list of lists for gathers of several tensors, as over gloo.
    `limit` is the op's timeout in seconds, `number` its number among those of its group. `ran` is how long a
    synchronous op ran, 0 for an asynchronous one, whose works know; None if the group was not asked to measure. A
    receive's `source` holds its sender once it is complete.
    """

    def __init__(
        self,
        works: Sequence[Work],
        tensors: Filled,
        limit: float,
        number: int,
        ran: float | None = None,
        source: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._limit, self._number, self._ran, self._source = limit, number, ran, source
        self._works = tuple(works)
        self._tensors: list[Any] = list(tensors)
        self._future: Future[list[Any]] | None = None
        self._lock = threading.Lock()

    @property
    def parts(self) -> tuple[Work, ...]:
        """holdfast's works behind this one."""
        return self._works

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Return True when the op is complete. Raises its error; `StillRunning`, a TimeoutError, after `timeout`."""
        left = time_left(seconds(timeout))
        for work in self._works:
            work.wait(left())
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._limit)

    def _get_sequence_number(self) -> int:
        return self._number

    def _get_duration(self) -> float:
        """How many milliseconds the op ran, without its time in the queue."""
        if self._ran is None:
            raise Unsupported(
                "_get_duration of a work without timing", "call _enable_collectives_timing() of its group before the op"
            )
        if not self.is_success():
            raise HoldfastError("_get_duration of a work that is not complete, or has failed: wait for it first")
        return 1e3 * (self._ran + sum(work.seconds or 0.0 for work in self._works))

    def _source_rank(self) -> int:
        return self._source[0] if self._source else -1

    source_rank = _source_rank

    def is_completed(self) -> bool:
        return all(work.done() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Any]:
        return self._tensors

    def get_future(self) -> Future[list[Any]]:
        """A future of `result()`; one that fails carries the op's error as a RuntimeError with its text."""
        with self._lock:
            if self._future is None:
                self._future = _future_of(self)
            return self._future


def _future_of(work: TorchWork) -> Future[list[Any]]:
    """A future of a work's result; unless the work is complete, a thread of its own completes the future.

    Callbacks may wait for ops that they issue (PowerSGD's do), so they must not run in the thread that runs the ops.
    """
    start: Future[list[Any]] = Future()

    def outcome(_: Any) -> list[Any]:
        error = work.exception()
        if error is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return work.result()

    future = start.then(outcome)

    def complete() -> None:
        try:
            work.wait()
        except BaseException:
            pass  # `outcome` raises it
        start.set_result(work.result())

    if work.is_completed():
        complete()
    else:
        threading.Thread(target=complete, name="holdfast-future", daemon=True).start()
    return future
