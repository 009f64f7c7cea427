"""`Offer`: what a rank publishes about itself at the rendezvous, and its JSON form."""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.comms.rendezvous.fetching import MAX_BYTES, decode
from holdfast.comms.transport.base import Peer

_REASON_CHARACTERS = 500

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Reason = Annotated[str, msgspec.Meta(max_length=_REASON_CHARACTERS)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's process, its arguments of `connect`, and why it cannot run some backends.

    `nonce` is new for every offer. `preference` is the requested backends in order, which with `auto` are those that
    this rank has; `unavailable` maps those that this rank cannot run to the reason. `check`: agreement checks are on at
    this rank. `agreed` is what else must be equal on all ranks: by what name (hints, members), its value.
    """

    nonce: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    peer: Peer
    size: Annotated[int, msgspec.Meta(ge=1)]
    preference: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=32)]
    unavailable: Annotated[dict[Name, Reason], msgspec.Meta(max_length=32)]
    check: bool
    auto: bool = False
    agreed: Annotated[dict[Name, Text], msgspec.Meta(max_length=64)] = {}

    @property
    def asked(self) -> str:
        """The backend that this rank passed to `connect`."""
        return "auto" if self.auto else ",".join(self.preference)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def shorten(reasons: dict[str, str]) -> dict[str, str]:
    """Cut reasons to the length that fits an offer."""
    return {name: reason[:_REASON_CHARACTERS] for name, reason in reasons.items()}


def decode_offer(key: str, data: bytes) -> Offer:
    """Decode the offer in `data`, found under `key`. Raises `CorruptData`."""
    if len(data) > MAX_BYTES:
        raise CorruptData(f"{key!r} at the rendezvous has {len(data)} bytes, more than {MAX_BYTES}")
    offer = decode(key, data, Offer)
    peer = offer.peer
    if not (0 < peer.pid < 1 << 31 and 0 <= peer.started < 1 << 63 and 0 < len(peer.host) <= 500):
        raise CorruptData(f"{key!r} at the rendezvous names no process: {str(peer)[:200]}")
    return offer
