"""Checks that all ranks issue the same op: what HOLDFAST_CHECK=1 turns on.

Before each collective every rank tells the others, in one small all-gather, what it is about to do. If they differ,
all ranks raise the same `Mismatch`, and no byte of the op has moved.
"""

from __future__ import annotations

import torch

from holdfast.comms.errors import Mismatch
from holdfast.comms.transport.base import Transport

_BYTES = 192


class Agreement:
    """Compares op descriptions over a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._mine = torch.zeros(_BYTES, dtype=torch.uint8, device="cpu")
        self._all = [torch.zeros(_BYTES, dtype=torch.uint8, device="cpu") for _ in range(transport.size)]

    def check(self, words: str, deadline: float) -> None:
        """Raise `Mismatch` unless every rank says the same words of its next collective: the op and its number.

        Sends and receives do not count: ranks may well differ in those.
        """
        said = words.encode()[:_BYTES]
        self._mine.zero_()
        self._mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        self._transport.all_gather(self._all, self._mine, deadline)
        self._compare()

    def _compare(self) -> None:
        if all(torch.equal(self._all[0], other) for other in self._all[1:]):
            return
        words = [bytes(t.numpy()).rstrip(b"\0").decode(errors="replace") for t in self._all]
        common = max(set(words), key=lambda word: (words.count(word), -words.index(word)))
        usual = words.index(common)
        odd = "; ".join(f"rank {r} called {word}" for r, word in enumerate(words) if word != common)
        raise Mismatch(
            f"{odd}; rank {usual} called {common}; every rank must issue the same ops, in the same order, with the "
            "same shapes and dtypes"
        )
