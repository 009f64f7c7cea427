"""One connection through the proxy: two directions, each read piece by piece and written as its policy says.

A direction that is cut is not read: the sender's buffers fill up, as they do when packets vanish, and the bytes go on
when the cut is over.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.harness.links.policy import BULK, RETRANSMISSION, LinkPolicy

PIECE = 1 << 18
"""The most bytes of one read."""

WINDOW = 1 << 22
"""The most bytes that one direction holds back, about as much as TCP keeps in flight."""

_LINGER_NOT = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Direction:
    """The direction from one process to another on one connection, with its counters."""

    source: int
    target: int
    control: bool
    bytes: int = 0
    held: int = 0
    lost: int = 0
    corrupted: int = 0
    _free_at: float = field(default=0.0, repr=False)

    def due(self, policy: LinkPolicy, size: int, dice: random.Random, now: float) -> float:
        """When a piece of `size` bytes that is read now may be written: never before an earlier piece."""
        self.held += bool(size and (policy.delay or policy.jitter or policy.rate))
        at = now + policy.delay + policy.jitter * dice.random()
        if policy.loss and dice.random() < policy.loss:
            self.lost += 1
            at += RETRANSMISSION
        at = max(at, self._free_at)
        if policy.rate:
            at += size / policy.rate
        self._free_at = at
        return at

    def spoil(self, policy: LinkPolicy, piece: bytearray, dice: random.Random) -> None:
        """Flip one bit of a piece if the policy draws it. The end of the stream is an empty piece without bits."""
        if piece and policy.corrupt and (policy.headers or len(piece) >= BULK) and dice.random() < policy.corrupt:
            place = dice.randrange(len(piece) // 2, len(piece))
            piece[place] ^= 1 << dice.randrange(8)
            self.corrupted += 1


class Relay:
    """A connection led to the proxy: `near` is its socket to the connecting process, `address` its wanted target.

    `policy(direction)` is the current policy; call `look_again` whenever that may have changed.
    """

    def __init__(
        self,
        near: socket.socket,
        address: tuple[str, int],
        there: Direction,
        back: Direction,
        policy: Callable[[Direction], LinkPolicy],
        dice: random.Random,
    ) -> None:
        self.there, self.back = there, back
        self.was_reset = False
        self._near, self.address = near, address
        self._far = socket.socket(near.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._policy, self._dice = policy, dice
        self._changed = asyncio.Event()

    def look_again(self) -> None:
        """Apply changed policies."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def run(self) -> None:
        """Relay until both directions have ended. Reset both sides if one fails, or on a policy's `reset`."""
        tasks = [asyncio.create_task(self._until_reset()), asyncio.create_task(self._connected())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done or tasks[1].exception() is not None:
                self.was_reset = True
                for each in (self._near, self._far):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._near.close()
            self._far.close()

    async def _connected(self) -> None:
        self._hold(self.there)
        await self._open(self.there)
        await asyncio.get_running_loop().sock_connect(self._far, self.address)
        for each in (self._near, self._far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.TaskGroup() as group:
            for source, target, direction in (
                (self._near, self._far, self.there),
                (self._far, self._near, self.back),
            ):
                queue: asyncio.Queue[tuple[float, bytearray]] = asyncio.Queue(WINDOW // PIECE)
                group.create_task(self._read(source, queue, direction))
                group.create_task(self._write(queue, target, direction))

    async def _until_reset(self) -> None:
        while not (self._policy(self.there).reset or self._policy(self.back).reset):
            await self._changed.wait()

    def _hold(self, direction: Direction) -> None:
        """Count what is about to wait until the direction is not cut."""
        direction.held += self._policy(direction).cut

    async def _open(self, direction: Direction) -> None:
        """Wait until the direction is not cut."""
        while self._policy(direction).cut:
            await self._changed.wait()

    async def _read(
        self, source: socket.socket, queue: asyncio.Queue[tuple[float, bytearray]], direction: Direction
    ) -> None:
        loop = asyncio.get_running_loop()
        buffer = bytearray(PIECE)
        while True:
            await self._open(direction)
            count = await loop.sock_recv_into(source, buffer)
            policy, piece = self._policy(direction), buffer[:count]
            direction.spoil(policy, piece, self._dice)
            await queue.put((direction.due(policy, count, self._dice, time.monotonic()), piece))
            if count == 0:
                return

    async def _write(
        self, queue: asyncio.Queue[tuple[float, bytearray]], target: socket.socket, direction: Direction
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, piece = await queue.get()
            if (early := due - time.monotonic()) > 0:
                await asyncio.sleep(early)
            if piece:
                self._hold(direction)
            await self._open(direction)
            if not piece:
                target.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(target, piece)
            direction.bytes += len(piece)
