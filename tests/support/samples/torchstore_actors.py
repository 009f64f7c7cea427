"""Monarch actors that use torchstore's interface, as code written for torchstore does."""

from __future__ import annotations

import os
from typing import Any

import torch
from monarch.actor import Actor, current_rank, endpoint

import holdfast.store.torchstore as ts


class Worker(Actor):
    """A process that puts and gets by the rank that it has."""

    def __init__(self) -> None:
        self.rank = current_rank().rank
        os.environ["LOCAL_RANK"] = str(self.rank)

    @endpoint
    async def initialize(self, store_name: str) -> None:
        await ts.initialize(store_name=store_name)

    @endpoint
    async def shutdown(self, store_name: str) -> None:
        await ts.shutdown(store_name)

    @endpoint
    async def put(self, value: Any, store_name: str = "torchstore") -> None:
        await ts.put(f"key_{self.rank}", value, store_name=store_name)

    @endpoint
    async def put_rank(self) -> None:
        await ts.put(f"key_{self.rank}", torch.full((5000,), self.rank))

    @endpoint
    async def get(self, rank: int, store_name: str = "torchstore") -> Any:
        return await ts.get(f"key_{rank}", store_name=store_name)

    @endpoint
    async def why_not(self, key: str) -> str:
        try:
            await ts.get(key)
        except KeyError as error:
            return str(error)
        return ""
