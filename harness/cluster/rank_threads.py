"""Ranks as threads of this process: for the `inproc` backend, in tests and notebooks.

A thread cannot be killed: one that does not return in time stays behind, and the error says where it is.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from holdfast.ft.processes.packed_errors import pack_error
from holdfast.harness.cluster.cluster_ranks import ClusterRanks, ClusterSettings, RankResult
from holdfast.harness.cluster.errors import RunTimeout, rank_failure
from holdfast.harness.cluster.rank_worker import ConnectArguments, Running, call_connected


class RankThreads(ClusterRanks):
    """Ranks that are `size` new threads in each call."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._calls = 0

    def start(self) -> None:
        pass

    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float,
        abort: bool,
    ) -> list[RankResult]:
        self._calls += 1
        settings = self._settings
        meeting = dist.HashStore()
        done: queue.SimpleQueue[RankResult] = queue.SimpleQueue()
        running = [Running(self._calls) for _ in range(settings.size)]

        def body(rank: int) -> None:
            limit = min(timeout, settings.timeout)
            link = ConnectArguments(
                settings.backend, rank, settings.size, meeting, f"call-{self._calls}", settings.device, limit
            )
            try:
                value = call_connected(link, running[rank], fn, args, kwargs)
                done.put(RankResult(rank, time.monotonic(), value))
            except BaseException as error:
                failure = rank_failure(rank, error, pack_error(error).trace)
                done.put(RankResult(rank, running[rank].failed_at or time.monotonic(), error=failure))

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"holdfast-rank-{rank}", daemon=True)
            for rank in range(settings.size)
        ]
        for thread in threads:
            thread.start()
        outcomes = self._gather(done, running, threads, timeout, abort)
        for rank, thread in enumerate(threads):
            if rank not in {o.rank for o in outcomes if isinstance(o.error, RunTimeout)}:
                thread.join(5.0)
        return outcomes

    def close(self) -> None:
        pass

    def _gather(
        self,
        done: queue.SimpleQueue[RankResult],
        running: list[Running],
        threads: list[threading.Thread],
        timeout: float,
        abort: bool,
    ) -> list[RankResult]:
        began = time.monotonic()
        deadline = began + timeout
        outcomes: dict[int, RankResult] = {}
        aborted = False
        while len(outcomes) < len(threads):
            try:
                outcome = done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                outcomes |= _stuck(outcomes, running, threads, began, aborted)
                break
            outcomes[outcome.rank] = outcome
            if outcome.error is not None and abort and not aborted:
                aborted = True
                deadline = min(deadline, time.monotonic() + self._settings.grace)
                for rank, call in enumerate(running):
                    if rank not in outcomes:
                        call.abort(f"rank {outcome.rank} failed")
        return [outcomes[rank] for rank in sorted(outcomes)]


def _stuck(
    outcomes: dict[int, RankResult],
    running: list[Running],
    threads: list[threading.Thread],
    began: float,
    is_consequence: bool,
) -> dict[int, RankResult]:
    stuck = [rank for rank in range(len(threads)) if rank not in outcomes]
    frames = sys._current_frames()
    where = []
    for rank in stuck:
        running[rank].abort("out of time")
        frame = frames.get(threads[rank].ident or 0)
        where.append(f"[rank {rank}] " + "".join(traceback.format_stack(frame)[-6:]))
    error = RunTimeout(stuck, time.monotonic() - began, "\n".join(where))
    moment = float("inf") if is_consequence else time.monotonic()
    return {rank: RankResult(rank, moment, error=error) for rank in stuck}
