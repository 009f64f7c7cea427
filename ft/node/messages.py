"""The messages between members. A notice is the name of a remote call and its body: a message in msgpack.

Sans-I/O. A notice that cannot be read is dropped with `CorruptData`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData
from holdfast.ft.membership.events import (
    Cleared,
    ProvenDeaths,
    SpareAnnounced,
    Suspicion,
    ViewDeltaReceived,
    ViewRead,
)
from holdfast.ft.membership.view import View, ViewDelta

Notice = tuple[str, bytes]


class Beat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender lives, in `epoch` (0: it has no view)."""

    epoch: int


class Farewell(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender leaves the job, as if it had died, for `reason`; `error` as in `Death`."""

    reason: str
    error: str


class Share(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Items of the rendezvous table of `epoch`."""

    epoch: int
    items: dict[str, bytes]


class Suspicions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one member has found out about others in one turn: a host that is lost has many members."""

    suspicions: tuple[Suspicion, ...]
    cleared: tuple[Cleared, ...]


class DetectorMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """From a detector to the same detector of another process."""

    body: bytes


Message = (
    ViewRead
    | ViewDeltaReceived
    | SpareAnnounced
    | ProvenDeaths
    | Suspicions
    | Beat
    | Farewell
    | Share
    | DetectorMessage
)
"""A notice as it is received. The connection that it came over names the sender: do not believe what it says of that.
"""

_KINDS: Mapping[str, type[Any]] = {
    "beat": Beat,
    "spare": SpareAnnounced,
    "deaths": ProvenDeaths,
    "leave": Farewell,
    "share": Share,
    "suspect": Suspicions,
    "detect": DetectorMessage,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}

_encode = msgspec.msgpack.Encoder().encode
_DECODERS: Mapping[str, Callable[[bytes], Message]] = {
    **{name: msgspec.msgpack.Decoder(kind).decode for name, kind in _KINDS.items()},
    "install": lambda body: ViewRead(View.decode(body)),
    "change": lambda body: ViewDeltaReceived(ViewDelta.decode(body)),
}


def notice(message: Message) -> Notice:
    """The notice that carries a message."""
    match message:
        case ViewRead(View() as view):  # it keeps its encoding: many members get the same one
            return "install", view.encode()
        case ViewDeltaReceived(change):
            return "change", change.encode()
    return _NAMES[type(message)], _encode(message)


def decode(method: str, body: bytes) -> Message:
    """The message in a notice. Raises `CorruptData` for anything that is not an encoded one."""
    try:
        return _DECODERS[method](body)
    except UNDECODABLE as error:
        raise CorruptData(f"a notice {method!r} cannot be read: {error}") from error


def handlers(hear: Callable[[str, Message], None]) -> dict[str, Callable[[str, bytes], bytes]]:
    """The handlers for the calls of other members; `hear` is called with the id of the sender.

    The sender has proved to have the job's key.
    """

    def handle(method: str, peer: str, body: bytes) -> bytes:
        try:
            message = decode(method, body)
        except CorruptData as error:
            raise CorruptData(f"from {peer}: {error}") from error
        hear(peer, message)
        return b""

    return {method: partial(handle, method) for method in _DECODERS}
