"""The messages between members: name and form of each notice, and what it becomes where it is received.

Sans-I/O. A notice is the name of a remote call and its body, in msgpack. A notice that cannot be read is dropped with
`CorruptData`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.ft.membership.events import (
    Cleared,
    Death,
    ProvenDeaths,
    SpareAnnounced,
    Suspicion,
    ViewDeltaReceived,
    ViewRead,
)
from holdfast.ft.membership.view import Member, View
from holdfast.ft.membership.view_delta import ViewDelta

Notice = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class Beat:
    """The sender lives, in `epoch` (0: it has no view)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Farewell:
    """The sender leaves the job, for `reason`; `error` as in `Death`."""

    reason: str
    error: str


@dataclass(frozen=True, slots=True)
class Share:
    """Items of the rendezvous table of `epoch`."""

    epoch: int
    items: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class DetectorMessage:
    """From a detector to the same detector of another process."""

    body: bytes


Message = (
    ViewRead
    | ViewDeltaReceived
    | SpareAnnounced
    | ProvenDeaths
    | Suspicion
    | Cleared
    | Beat
    | Farewell
    | Share
    | DetectorMessage
)
"""A notice as it is received. The sender is not in it: the connection that it came over names it."""

_encode = msgspec.msgpack.Encoder().encode
_member = msgspec.msgpack.Decoder(Member)
_deaths = msgspec.msgpack.Decoder(list[tuple[str, str, str]])
_suspicion = msgspec.msgpack.Decoder(tuple[str, str, int])
_clearance = msgspec.msgpack.Decoder(tuple[str, int])
_farewell = msgspec.msgpack.Decoder(tuple[str, str])
_epoch = msgspec.msgpack.Decoder(int)
_items = msgspec.msgpack.Decoder(tuple[int, dict[str, bytes]])


def _suspect(body: bytes) -> Suspicion:
    member, evidence, number = _suspicion.decode(body)
    return Suspicion(member, "", evidence, number)


def _clear(body: bytes) -> Cleared:
    member, number = _clearance.decode(body)
    return Cleared(member, "", number)


_DECODERS: Mapping[str, Callable[[bytes], Message]] = {
    "beat": lambda body: Beat(_epoch.decode(body)),
    "install": lambda body: ViewRead(View.decode(body)),
    "change": lambda body: ViewDeltaReceived(ViewDelta.decode(body)),
    "spare": lambda body: SpareAnnounced(_member.decode(body)),
    "deaths": lambda body: ProvenDeaths(tuple(Death(*death) for death in _deaths.decode(body))),
    "leave": lambda body: Farewell(*_farewell.decode(body)),
    "share": lambda body: Share(*_items.decode(body)),
    "suspect": _suspect,
    "clear": _clear,
    "detect": DetectorMessage,
}


def beat(view: View | None) -> Notice:
    """This process lives, in the epoch of `view`."""
    return "beat", _encode(view.epoch if view is not None else 0)


def install(view: View) -> Notice:
    """The newest view is `view`."""
    return "install", view.encode()


def change(what: ViewDelta) -> Notice:
    """The newest view, as the difference from the one before."""
    return "change", what.encode()


def spare(me: Member) -> Notice:
    """`me` waits to be taken into the job."""
    return "spare", _encode(me)


def deaths(seen: Iterable[Death]) -> Notice:
    """These processes have ended, as the sender has seen."""
    return "deaths", _encode([(death.id, death.evidence, death.error) for death in seen])


def leave(reason: str, error: str = "") -> Notice:
    """The sender leaves the job, as if it had died; `error` as in `Death`."""
    return "leave", _encode((reason, error))


def share(epoch: int, items: Mapping[str, bytes]) -> Notice:
    """Items that were set in the rendezvous table of `epoch`."""
    return "share", _encode((epoch, items))


def suspicion(said: Suspicion | Cleared) -> Notice:
    """The sender suspects a member, or has cleared it."""
    if isinstance(said, Suspicion):
        return "suspect", _encode((said.member, said.evidence, said.number))
    return "clear", _encode((said.member, said.number))


def detect(body: bytes) -> Notice:
    """A message from a detector to the same detector of another process."""
    return "detect", body


def decode(method: str, body: bytes) -> Message:
    """The message in a notice. Raises `CorruptData` for anything that is not an encoded one."""
    try:
        return _DECODERS[method](body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
