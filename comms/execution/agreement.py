"""Checks that all ranks issue the same op. HOLDFAST_CHECK=1 turns it on.

Before each collective the ranks exchange a description of it in one small all-gather. If the descriptions differ, all
ranks raise the same `Mismatch`, and no byte of the op has moved.
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
        self._own = torch.zeros(_BYTES, dtype=torch.uint8, device="cpu")
        self._all = [torch.zeros(_BYTES, dtype=torch.uint8, device="cpu") for _ in range(transport.size)]

    def check(self, words: str, deadline: float) -> None:
        """Raise `Mismatch` unless `words` (the next collective and its number) is the same on every rank.

        Sends and receives are not counted in that number, since ranks may differ in them.
        """
        encoded = words.encode()[:_BYTES]
        self._own.zero_()
        self._own[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        self._transport.all_gather(self._all, self._own, deadline)
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
