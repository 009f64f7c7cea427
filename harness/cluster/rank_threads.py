"""Ranks as threads of this process: for the `inproc` backend, in tests and notebooks.

A thread cannot be killed: one that does not return in time stays behind, and the error says where it is.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from holdfast.ft.processes.remote_calls import pack_error
from holdfast.harness.cluster.cluster_ranks import ClusterRanks, ClusterSettings, RankResult, RunTimeout, rank_failure
from holdfast.harness.cluster.rank_worker import Running, call_connected


class RankThreads(ClusterRanks):
    """Ranks that are `size` new threads in each call."""

    def __init__(self, settings: ClusterSettings) -> None:
        super().__init__(settings)
        self._done: queue.SimpleQueue[RankResult] = queue.SimpleQueue()
        self._running: list[Running] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        pass

    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        abort: bool,
    ) -> list[RankResult]:
        self._calls += 1
        size, meeting = self._settings.size, dist.HashStore()
        done = self._done = queue.SimpleQueue()
        running = self._running = [Running(self._calls) for _ in range(size)]

        def body(rank: int) -> None:
            try:
                value = call_connected(self._link(rank, meeting), running[rank], fn, args, kwargs)
                done.put(RankResult(rank, time.monotonic(), value))
            except BaseException as error:
                failure = rank_failure(rank, error, pack_error(error).trace)
                done.put(RankResult(rank, running[rank].failed_at or time.monotonic(), error=failure))

        self._threads = [
            threading.Thread(target=body, args=(rank,), name=f"holdfast-rank-{rank}", daemon=True)
            for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()
        outcomes = self._gather({}, abort)
        for outcome in outcomes:
            if not isinstance(outcome.error, RunTimeout):
                self._threads[outcome.rank].join(5.0)
        return outcomes

    def close(self) -> None:
        pass

    def _receive(self, outcomes: dict[int, RankResult], deadline: float) -> None:
        with contextlib.suppress(queue.Empty):
            outcome = self._done.get(timeout=max(0.0, deadline - time.monotonic()))
            outcomes[outcome.rank] = outcome

    def _abort(self, rank: int, reason: str) -> None:
        self._running[rank].abort(reason)

    def _end_stuck(self, ranks: Sequence[int]) -> list[str]:
        """A thread cannot be ended: its ops are aborted, and it stays behind if it is in none."""
        frames = sys._current_frames()
        where = []
        for rank in ranks:
            self._abort(rank, "out of time")
            frame = frames.get(self._threads[rank].ident or 0)
            where.append(f"[rank {rank}] " + "".join(traceback.format_stack(frame)[-6:]))
        return where
