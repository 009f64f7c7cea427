"""`MessageMatcher`: matches messages to receives by sender and tag, in order, and keeps unmatched messages."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch

from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout
from holdfast.comms.quantities import time_left
from holdfast.comms.tensors.packing import DTYPES, packed, unpack
from holdfast.comms.work import Work

Tensor = torch.Tensor

HEADER_WORDS = 3


@dataclass(frozen=True, slots=True)
class Header:
    """The header before a message's bytes."""

    tag: int
    nbytes: int
    dtype: torch.dtype

    @classmethod
    def read(cls, words: Tensor) -> Header:
        tag, nbytes, dtype = words.tolist()
        return cls(tag, nbytes, DTYPES[dtype])

    def words(self, device: torch.device) -> Tensor:
        return torch.tensor([self.tag, self.nbytes, DTYPES.index(self.dtype)], dtype=torch.int64, device=device)

    def mismatch(self, tensor: Tensor, src: int) -> Mismatch | None:
        """The error if the message does not fit into `tensor`; None if it fits."""
        if (self.nbytes, self.dtype) == (tensor.nbytes, tensor.dtype):
            return None
        return Mismatch(
            f"rank {src} sent {self.nbytes} bytes of {self.dtype} under tag {self.tag}, the receive is for "
            f"{tensor.nbytes} bytes of {tensor.dtype}; both sides must pass the same size and dtype"
        )


class PendingMessage(Work):
    """A message that waits for its peer. Its deadline applies until its bytes begin to move: then it is `claimed`.

    `expire` fails it if its deadline has passed and it is not claimed.
    """

    __slots__ = ("_expire", "claimed", "deadline", "timeout")

    def __init__(self, name: str, timeout: float, expire: Callable[[], None]) -> None:
        super().__init__(name)
        self.timeout, self.deadline = timeout, time.monotonic() + timeout
        self.claimed = False
        self._expire = expire

    def ends_within(self, limit: float | None) -> bool:
        left = time_left(limit)
        until = max(self.deadline - time.monotonic(), 0.0)
        if super().ends_within(until if limit is None else min(until, limit)):
            return True
        self._expire()
        return super().ends_within(left())

    def done(self) -> bool:
        if not super().done():
            self._expire()
        return super().done()

    def exception(self) -> BaseException | None:
        self.done()
        return super().exception()

    def fail(self, error: BaseException) -> None:
        self.run(partial(_raise, error))


class PendingRecv(PendingMessage):
    """A receive that waits to be matched to a message. `source` holds the sender once the message has arrived."""

    __slots__ = ("source", "src", "tag", "tensor")

    def __init__(self, tensor: Tensor, src: int | None, tag: int, timeout: float, expire: Callable[[], None]) -> None:
        super().__init__("recv", timeout, expire)
        self.tensor, self.src, self.tag = tensor, src, tag
        self.source: list[int] = [] if src is None else [src]

    def take(self, src: int, header: Header, payload: Tensor) -> None:
        """Complete with a kept message."""
        self.run(partial(self._take, src, header, payload))

    def _take(self, src: int, header: Header, payload: Tensor) -> None:
        if (mismatch := header.mismatch(self.tensor, src)) is not None:
            raise mismatch
        flat = packed(self.tensor)
        flat.view(-1).view(torch.uint8).copy_(payload)
        unpack(flat, self.tensor)
        self.source[:] = [src]


class MessageMatcher:
    """One rank's pending receives, and the messages that arrived before their receive was posted."""

    def __init__(self, size: int) -> None:
        self._ranks = range(size)
        self._changed = threading.Condition(threading.RLock())
        self._pending: deque[PendingRecv] = deque()
        self._kept: dict[tuple[int, int], deque[tuple[Header, Tensor]]] = {}
        self._broken: dict[int, HoldfastError] = {}
        self._over: HoldfastError | None = None

    def expect(self, tensor: Tensor, src: int | None, tag: int, timeout: float) -> PendingRecv:
        """Post a receive from `src`, or from any rank (None)."""
        expected = PendingRecv(tensor, src, tag, timeout, lambda: self._expire(expected))
        with self._changed:
            sources = self._ranks if src is None else (src,)
            for each in sources:
                if kept := self._kept.get((each, tag)):
                    header, payload = kept.popleft()
                    if not kept:
                        del self._kept[each, tag]
                    break
            else:
                error = self._over or next((self._broken[each] for each in sources if each in self._broken), None)
                if error is not None:
                    raise error.again()
                self._pending.append(expected)
                self._changed.notify_all()
                return expected
        expected.take(each, header, payload)
        return expected

    def claim(self, src: int, header: Header) -> PendingRecv | None:
        """Match a message from `src` to a pending receive; None if none is posted."""
        with self._changed:
            now = time.monotonic()
            for expected in self._pending:
                if expected.tag == header.tag and expected.src in (src, None) and expected.deadline > now:
                    expected.claimed = True
                    self._pending.remove(expected)
                    return expected
        return None

    def keep(self, src: int, header: Header, payload: Tensor) -> None:
        """Keep a message that began to arrive without a receive, or complete a receive posted since."""
        with self._changed:
            expected = self.claim(src, header)
            if expected is None:
                self._kept.setdefault((src, header.tag), deque()).append((header, payload))
                return
        expected.take(src, header, payload)

    def _expire(self, expected: PendingRecv) -> None:
        """Fail a receive with a passed deadline, unless a message for it has begun to arrive."""
        with self._changed:
            if expected.claimed or expected.deadline > time.monotonic():
                return
            expected.claimed = True
            if expected in self._pending:
                self._pending.remove(expected)
        missing = (expected.src,) if expected.src is not None else ()
        expected.fail(OpTimeout("recv", 0, expected.timeout, missing))

    # -- called by the receiving threads

    def wanted(self, src: int) -> bool:
        """Whether a receive is pending that a message from `src` could complete."""
        with self._changed:
            now = time.monotonic()
            return any(each.src in (src, None) and each.deadline > now for each in self._pending)

    def wait_wanted(self, src: int) -> bool:
        """Wait until `wanted(src)`. Returns False once the group is over or `src` has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self.wanted(src))
            return self._over is None and src not in self._broken

    # -- the end

    def fail(self, src: int, error: HoldfastError) -> None:
        """Fail the pending and later receives from `src`, which can send nothing more, and those from any rank."""
        with self._changed:
            self._broken.setdefault(src, error)
            failed = [each for each in self._pending if each.src in (src, None)]
            self._end(failed)
        for expected in failed:
            expected.fail(error.again())

    def fail_all(self, error: HoldfastError) -> None:
        """Fail all pending and later receives."""
        with self._changed:
            self._over = self._over or error
            failed = list(self._pending)
            self._end(failed)
        for expected in failed:
            expected.fail(error.again())

    def _end(self, failed: list[PendingRecv]) -> None:
        for expected in failed:
            expected.claimed = True
            self._pending.remove(expected)
        self._changed.notify_all()


def _raise(error: BaseException) -> NoReturn:
    raise error
