"""The messages of one collective op, in the form that algorithms use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

Posted = object
"""A message under way; only the transport knows its type."""


class Exchange(msgspec.Struct, frozen=True):
    """Sends and receives between this rank and the others, all under one tag."""

    post_send: Callable[[torch.Tensor, int, int], Posted]
    post_recv: Callable[[torch.Tensor, int, int], Posted]
    complete: Callable[[Sequence[Posted], float, str, int], None]
    rank: int
    size: int
    tag: int
    op: str
    seq: int
    deadline: float

    def begin_send(self, tensor: torch.Tensor, dst: int) -> Posted:
        return self.post_send(tensor, dst, self.tag)

    def begin_recv(self, tensor: torch.Tensor, src: int) -> Posted:
        return self.post_recv(tensor, src, self.tag)

    def finish(self, *posted: Posted) -> None:
        self.complete(posted, self.deadline, self.op, self.seq)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.finish(self.post_send(tensor, dst, self.tag))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self.finish(self.post_recv(tensor, src, self.tag))

    def swap(self, given: torch.Tensor, dst: int, taken: torch.Tensor, src: int) -> None:
        """Send `given` to `dst` and receive `taken` from `src`, at once."""
        tag = self.tag
        posted = self.post_recv(taken, src, tag), self.post_send(given, dst, tag)
        self.complete(posted, self.deadline, self.op, self.seq)


Begin = Callable[[float], Exchange]
"""Begins an op that has this deadline."""


def bounds(count: int, parts: int) -> list[int]:
    """The `parts` + 1 bounds of `count` elements in nearly equal parts."""
    return [count * part // parts for part in range(parts + 1)]
