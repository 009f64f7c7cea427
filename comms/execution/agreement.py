"""Checks that all ranks issue the same op. HOLDFAST_CHECK=1 turns it on.

Before each collective the ranks exchange a digest of its description, and the beginning of it, in one small all-gather.
If the digests differ, they exchange the descriptions, all ranks raise the same `Mismatch`, and no byte of the op has
moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from holdfast.comms.errors import Mismatch
from holdfast.comms.transport.base import Transport, gather_bytes

_DIGEST, _LENGTH, _TEXT = 16, 4, 172


class Agreement:
    """Compares op descriptions over a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def check(self, words: str, deadline: float) -> None:
        """Raise `Mismatch` unless `words` (the next collective and its number) is the same on every rank.

        Sends and receives are not counted in that number, since ranks may differ in them.
        """
        encoded = words.encode()
        digest = hashlib.blake2b(encoded, digest_size=_DIGEST).digest()
        message = digest + len(encoded).to_bytes(_LENGTH, "little") + encoded[:_TEXT].ljust(_TEXT, b"\0")
        messages = gather_bytes(self._transport, message, deadline)
        if len({each[:_DIGEST] for each in messages}) > 1:
            self._raise(self._descriptions(messages, encoded, deadline))

    def _descriptions(self, messages: Sequence[bytes], mine: bytes, deadline: float) -> list[str]:
        """Every rank's description, in full. All ranks have seen the same messages, so all call this."""
        lengths = [int.from_bytes(message[_DIGEST : _DIGEST + _LENGTH], "little") for message in messages]
        texts = [message[_DIGEST + _LENGTH :] for message in messages]
        if max(lengths) > _TEXT:
            outputs = [torch.zeros(length, dtype=torch.uint8, device="cpu") for length in lengths]
            own = torch.tensor(list(mine), dtype=torch.uint8, device="cpu")
            self._transport.all_gather(outputs, own, deadline)
            texts = [bytes(output.numpy()) for output in outputs]
        return [text[:length].decode(errors="replace") for text, length in zip(texts, lengths, strict=True)]

    def _raise(self, words: list[str]) -> None:
        common = max(set(words), key=lambda word: (words.count(word), -words.index(word)))
        usual = words.index(common)
        odd = "; ".join(f"rank {r} called {word}" for r, word in enumerate(words) if word != common)
        raise Mismatch(
            f"{odd}; rank {usual} called {common}; every rank must issue the same ops, in the same order, with the "
            "same shapes and dtypes"
        )
