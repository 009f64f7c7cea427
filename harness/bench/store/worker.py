"""One worker: a publisher, holder or reader of one contestant, which carries out the orders of the bench.

It dials the socket of its team. While the others have their turn it sleeps in a read. It ends when the bench does: its
socket is closed then.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
import traceback
from collections.abc import Awaitable
from pathlib import Path

from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.message_socket import MessageSocket
from holdfast.harness.bench.store import data
from holdfast.harness.bench.store.drivers import DRIVERS, StoreDriver, WorkerPlan
from holdfast.harness.bench.store.shards import Shards
from holdfast.harness.bench.store.wire import (
    DECODER,
    Answer,
    Blank,
    Change,
    Check,
    Checked,
    Digests,
    Done,
    Failed,
    Get,
    How,
    Message,
    Prepare,
    Publish,
    StopStoreWorker,
    StoreWorkerReady,
    Took,
)

SOCKET = "socket"


async def serve(plan: WorkerPlan, driver: StoreDriver) -> None:
    """Carry out orders until the bench says stop, or is gone."""
    executor = OrderExecutor(plan, driver)
    with MessageSocket.dial(plan.folder / SOCKET, DECODER) as bench:
        bench.send(StoreWorkerReady(plan.role, plan.rank, os.getpid(), driver.detail))
        while True:
            try:
                order = await asyncio.to_thread(bench.receive)
            except EOFError:
                return
            if isinstance(order, StopStoreWorker):
                return
            try:
                bench.send(await executor.carry_out(order))
            except Exception as error:
                bench.send(Failed("".join(traceback.format_exception_only(error)).strip()))


class OrderExecutor:
    """Carries out orders on the source and the target of a worker."""

    def __init__(self, plan: WorkerPlan, driver: StoreDriver) -> None:
        self._plan, self._driver = plan, driver
        self._prepare = Prepare((), 0)
        self._shards: Shards | None = None
        self._source: data.State = {}
        self._target: data.State = {}
        self._whole: data.State = {}
        self._got: data.State = {}

    async def carry_out(self, order: Message) -> Answer:
        match order:
            case Prepare():
                self._prepare = order
                self._shards = Shards.of(order, self._plan) if order.sharded else None
                self._source, self._target, self._whole, self._got = {}, {}, {}, {}
            case Change(version, share):
                return self._change(version, share)
            case Publish(version):
                state = self._shards.give(self._source) if self._shards else self._source
                return await _timed(self._driver.publish(version, state))
            case Blank():
                self._got = {}
                self._target = self._target or (self._shards.target() if self._shards else self._new_target())
                data.blank(self._target)
                data.blank(self._whole)
            case Get(version, how):
                return await self._get(version, how)
            case Check(digests):
                got = {each.name: self._got[each.name] for each in self._prepare.tensors}
                pairs = zip(digests, data.digests(got), strict=True)
                return Checked(sum(expected != found for expected, found in pairs))
            case _:
                raise TypeError(f"a worker cannot do {order}")
        return Done()

    def _new_target(self) -> data.State:
        return data.target(self._prepare.tensors)

    def _change(self, version: int, share: float) -> Digests:
        self._source = self._source or data.source(self._prepare.tensors, self._prepare.seed)
        data.change(self._source, version, share)
        return Digests(self._shards.digests(self._source) if self._shards else (), data.digests(self._source))

    async def _get(self, version: int, how: How) -> Took:
        if how in ("load", "map"):
            call = self._driver.load if how == "load" else self._driver.map

            async def load() -> None:
                self._got = await call(version)

            return await _timed(load())
        if how == "whole":
            self._whole = self._whole or self._new_target()
            self._got = self._whole
            return await _timed(self._driver.get(version, self._whole))
        self._got = self._target
        into = self._shards.take(self._target) if self._shards else self._target
        ops = {"get": self._driver.get, "follow": self._driver.follow, "copy": self._driver.copy}
        return await _timed(ops[how](version, into))


async def _timed(op: Awaitable[None]) -> Took:
    gc.collect()
    before = _private_bytes()
    began = time.monotonic()
    await op
    ended = time.monotonic()
    return Took(began, ended, max(0, _private_bytes() - before))


def _private_bytes() -> int:
    """The bytes of this process's memory that no other process shares."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon:"))


def work(contestant: str, plan: WorkerPlan, channel: ProcessChannel) -> None:
    """Be a worker: what the process does that the zygote forked for it. `channel` is not used."""
    channel.close()
    driver = DRIVERS[contestant](plan)
    try:
        asyncio.run(serve(plan, driver))
    finally:
        driver.close()
