"""One worker of a contestant, a publisher, holder or reader: the bench calls its methods."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch

from holdfast.harness.bench.store import data
from holdfast.harness.bench.store.data import Shards, TensorShape
from holdfast.harness.bench.store.drivers import DRIVERS, PinnedDriver, StoreDriver, WorkerPlan
from holdfast.harness.measure.worker import serve

T = TypeVar("T")

MATRIX, PRODUCTS = 8192, 60
"""The side of the matrices that a GPU multiplies beside a publish, and how often: for about 90 ms on an H100."""

How = Literal["get", "follow", "copy", "load", "map", "whole"]
"""Get into the target, do so as soon as the version is published ("follow"), or the same copies without a check
("copy"); "load", "map": new tensors; "whole": all of each tensor, whatever the shards of this reader are.
"""


class Took(msgspec.Struct, frozen=True):
    """When the op began and ended (CLOCK_MONOTONIC, seconds), the same clock in all processes.

    `memory`: the bytes of private memory that the process has more since.
    """

    began: float
    ended: float
    memory: int

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Digests(msgspec.Struct, frozen=True):
    """The digests of the tensors of the source: of those of each reader's shards, and of the whole ones."""

    shards: tuple[tuple[int, ...], ...]
    whole: tuple[int, ...]


class StoreWorker:
    """What the bench may call: the source and the target of a worker, and its driver."""

    def __init__(self, plan: WorkerPlan, driver: StoreDriver) -> None:
        self._plan, self._driver = plan, driver
        self._tensors: tuple[TensorShape, ...] = ()
        self._seed = 0
        self._shards: Shards | None = None
        self._source: data.State = {}
        self._target: data.State = {}
        self._whole: data.State = {}
        self._got: data.State = {}
        self._matrices: tuple[torch.Tensor, ...] | None = None
        self._multiplied = 0.0
        self._pinned: PinnedDriver | None = None

    def prepare(self, tensors: tuple[TensorShape, ...], seed: int, sharded: tuple[int, int] | None = None) -> None:
        """What the state is; a source has values of `seed`.

        `sharded` (publishers, readers): the publishers are ranks of FSDP, the readers ranks of tensor parallelism.
        """
        plan = self._plan
        self._tensors, self._seed = tensors, seed
        self._shards = Shards.of(tensors, plan.role, plan.rank, sharded, plan.folder) if sharded else None
        self._source, self._target, self._whole, self._got = {}, {}, {}, {}

    def change(self, version: int, share: float = 0.0) -> Digests:
        """Make the source that of a version: a `share` of its elements differ, and one at least."""
        self._source = self._source or data.source(self._tensors, self._seed, self._plan.device)
        data.change(self._source, version, share)
        return Digests(self._shards.digests(self._source) if self._shards else (), data.digests(self._source))

    async def publish(self, version: int) -> Took:
        """Publish the source as a version."""
        state = self._shards.give(self._source) if self._shards else self._source
        return await _timed(self._driver.publish(version, state))

    def blank(self) -> None:
        """Overwrite the target, so that nothing in it can be right by chance."""
        self._got = {}
        self._target = self._target or (self._shards.target() if self._shards else self._new_target())
        data.blank(self._target)
        data.blank(self._whole)

    def _new_target(self) -> data.State:
        return data.target(self._tensors, self._plan.device)

    async def multiply(self, version: int | None, pinned: bool = False) -> Took:
        """Multiply matrices on the GPU, beside a publish of the source as a version, if that is given.

        `pinned`: beside a copy of it to pinned memory instead. The same products go before, uncounted, since a GPU that
        comes from rest has a higher clock.
        """
        if self._matrices is None:
            self._matrices = tuple(
                torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=self._plan.device) for _ in range(3)
            )
        one, other, into = self._matrices
        driver = self._driver
        if pinned:
            driver = self._pinned = self._pinned or PinnedDriver(self._plan)
            await driver.publish(0, self._source)  # the first one allocates
        for _ in range(PRODUCTS):
            torch.mm(one, other, out=into)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def publish(number: int) -> None:
            with torch.cuda.stream(side):  # so that it does not wait for the products
                asyncio.run(driver.publish(number, self._source))
                side.synchronize()

        async def multiply() -> None:
            for _ in range(PRODUCTS):
                torch.mm(one, other, out=into)
            done = torch.cuda.current_stream().record_event()  # all is queued, as by a trainer that runs ahead
            publishing = None if version is None else asyncio.create_task(asyncio.to_thread(publish, version))
            while not done.query():
                await asyncio.sleep(1e-4)
            self._multiplied = time.monotonic()
            if publishing is not None:
                await publishing

        took = await _timed(multiply())
        return Took(took.began, self._multiplied, took.memory)

    async def get(self, version: int, how: How = "get") -> Took:
        """Get a version, as `how` says."""
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

    def check(self, digests: tuple[int, ...]) -> int:
        """How many tensors of what was got last have other digests."""
        found = data.digests({each.name: self._got[each.name] for each in self._tensors})
        return sum(expected != digest for expected, digest in zip(digests, found, strict=True))


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


async def waited(call: Awaitable[T]) -> T:
    """A coroutine of anything that can be waited for."""
    return await call


def be_worker(contestant: str, plan: WorkerPlan, address: Path) -> None:
    """Serve as a worker until the bench hangs up: what the process does that the zygote forked."""
    driver = DRIVERS[contestant](plan)
    try:
        with asyncio.Runner() as runner:

            def run(call: Awaitable[Any]) -> Any:
                return runner.run(waited(call))

            serve(address, StoreWorker(plan, driver), plan.role, plan.rank, driver.detail, run)
    finally:
        driver.close()
