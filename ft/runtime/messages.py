"""What members tell each other: the name and form of each notice, and who hears it.

Sans-I/O. A notice is the name of a remote call and its body, in msgpack. One that cannot be read is `CorruptData`, and
nobody hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.ft.membership.events import Cleared, Death, Event, SpareAnnounced, Suspicion, ViewDeltaReceived, ViewRead
from holdfast.ft.membership.view import Member, View
from holdfast.ft.membership.view_delta import ViewDelta

Notice = tuple[str, bytes]

_encode = msgspec.msgpack.Encoder().encode
_member = msgspec.msgpack.Decoder(Member)
_deaths = msgspec.msgpack.Decoder(list[tuple[str, str]])
_suspicion = msgspec.msgpack.Decoder(tuple[str, str, int])
_clearance = msgspec.msgpack.Decoder(tuple[str, int])
_text = msgspec.msgpack.Decoder(str)
_epoch = msgspec.msgpack.Decoder(int)
_items = msgspec.msgpack.Decoder(tuple[int, dict[str, bytes]])


def beat(view: View | None) -> Notice:
    """This process lives, in the epoch of `view`."""
    return "beat", _encode(view.epoch if view is not None else 0)


def install(view: View) -> Notice:
    """The register shows `view`."""
    return "install", view.encode()


def change(what: ViewDelta) -> Notice:
    """The same, as the difference from the view before."""
    return "change", what.encode()


def spare(me: Member) -> Notice:
    """`me` waits to be taken into the job."""
    return "spare", _encode(me)


def deaths(seen: Iterable[Death]) -> Notice:
    """These processes have ended: this one has seen it."""
    return "deaths", _encode([(death.id, death.evidence) for death in seen])


def leave(reason: str) -> Notice:
    """This process is gone for the job, as if it had died."""
    return "leave", _encode(reason)


def share(epoch: int, items: Mapping[str, bytes]) -> Notice:
    """What was set in the table by which the members of `epoch` meet."""
    return "share", _encode((epoch, items))


def testimony(said: Suspicion | Cleared) -> Notice:
    """This process hears a member no more, or hears it again."""
    if isinstance(said, Suspicion):
        return "suspect", _encode((said.member, said.evidence, said.word))
    return "clear", _encode((said.member, said.word))


def detect(body: bytes) -> Notice:
    """What a detector tells its like."""
    return "detect", body


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears what. `peer` is the id of the member that said it, and has proved to have the job's key.

    `core` hears what is an event of the membership core as it stands.
    """

    core: Callable[[Event], None]
    beat: Callable[[str, int], None]
    deaths: Callable[[tuple[Death, ...]], None]
    share: Callable[[int, dict[str, bytes]], None]
    testimony: Callable[[str, str, str | None], None]
    """peer, member, evidence: `peer` hears `member` no more, or hears it (None)."""
    detectors: Callable[[str, bytes], None]


def handlers(listener: Listener) -> dict[str, Callable[[str, bytes], bytes]]:
    """What other members may call in this one."""
    core = listener.core

    def suspect(peer: str, body: bytes) -> None:
        member, evidence, number = _suspicion.decode(body)
        listener.testimony(peer, member, evidence)
        core(Suspicion(member, peer, evidence, number))

    def clear(peer: str, body: bytes) -> None:
        member, number = _clearance.decode(body)
        listener.testimony(peer, member, None)
        core(Cleared(member, peer, number))

    heard: dict[str, Callable[[str, bytes], None]] = {
        "beat": lambda peer, body: listener.beat(peer, _epoch.decode(body)),
        "install": lambda peer, body: core(ViewRead(View.decode(body), peer)),
        "change": lambda peer, body: core(ViewDeltaReceived(ViewDelta.decode(body), peer)),
        "spare": lambda peer, body: core(SpareAnnounced(_member.decode(body))),
        "deaths": lambda peer, body: listener.deaths(tuple(Death(*death) for death in _deaths.decode(body))),
        "leave": lambda peer, body: listener.deaths((Death(peer, f"it left: {_text.decode(body)}"),)),
        "share": lambda peer, body: listener.share(*_items.decode(body)),
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
