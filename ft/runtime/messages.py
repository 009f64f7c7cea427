"""The messages between members: name and form of each notice, and the callbacks that receive it.

Sans-I/O. A notice is the name of a remote call and its body, in msgpack. A notice that cannot be read is dropped with
`CorruptData`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.ft.membership.events import (
    LEFT,
    Cleared,
    Death,
    Event,
    SpareAnnounced,
    Suspicion,
    ViewDeltaReceived,
    ViewRead,
)
from holdfast.ft.membership.view import Member, View
from holdfast.ft.membership.view_delta import ViewDelta

Notice = tuple[str, bytes]

_encode = msgspec.msgpack.Encoder().encode
_member = msgspec.msgpack.Decoder(Member)
_deaths = msgspec.msgpack.Decoder(list[tuple[str, str, str]])
_suspicion = msgspec.msgpack.Decoder(tuple[str, str, int])
_clearance = msgspec.msgpack.Decoder(tuple[str, int])
_farewell = msgspec.msgpack.Decoder(tuple[str, str])
_epoch = msgspec.msgpack.Decoder(int)
_items = msgspec.msgpack.Decoder(tuple[int, dict[str, bytes]])


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


@dataclass(frozen=True, slots=True)
class MessageCallbacks:
    """The receivers of each kind of notice.

    `peer` is the id of the member that sent it; it has proved to have the job's key.

    `core` receives what is an event of the membership state machine as it stands.
    """

    core: Callable[[Event], None]
    beat: Callable[[str, int], None]
    deaths: Callable[[tuple[Death, ...]], None]
    share: Callable[[str, int, dict[str, bytes]], None]
    suspicion: Callable[[str, str, str | None], None]
    """(peer, member, evidence): `peer` suspects `member`, or has cleared it (None)."""
    detectors: Callable[[str, bytes], None]


def handlers(listener: MessageCallbacks) -> dict[str, Callable[[str, bytes], bytes]]:
    """The handlers for the calls of other members."""
    core = listener.core

    def suspect(peer: str, body: bytes) -> None:
        member, evidence, number = _suspicion.decode(body)
        listener.suspicion(peer, member, evidence)
        core(Suspicion(member, peer, evidence, number))

    def clear(peer: str, body: bytes) -> None:
        member, number = _clearance.decode(body)
        listener.suspicion(peer, member, None)
        core(Cleared(member, peer, number))

    def leave_of(peer: str, body: bytes) -> None:
        reason, error = _farewell.decode(body)
        listener.deaths((Death(peer, LEFT + reason, error),))

    heard: dict[str, Callable[[str, bytes], None]] = {
        "beat": lambda peer, body: listener.beat(peer, _epoch.decode(body)),
        "install": lambda peer, body: core(ViewRead(View.decode(body), peer)),
        "change": lambda peer, body: core(ViewDeltaReceived(ViewDelta.decode(body), peer)),
        "spare": lambda peer, body: core(SpareAnnounced(_member.decode(body))),
        "deaths": lambda peer, body: listener.deaths(tuple(Death(*death) for death in _deaths.decode(body))),
        "leave": leave_of,
        "share": lambda peer, body: listener.share(peer, *_items.decode(body)),
        "suspect": suspect,
        "clear": clear,
        "detect": listener.detectors,
    }
    return {name: _or_corrupt(act) for name, act in heard.items()}


def _or_corrupt(act: Callable[[str, bytes], None]) -> Callable[[str, bytes], bytes]:
    def handler(peer: str, body: bytes) -> bytes:
        try:
            act(peer, body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"a notice of {peer} cannot be read: {error}") from error
        return b""

    return handler
