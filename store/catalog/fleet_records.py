"""Records of the readers that follow the store, and of the switches that make them serve one version."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.comms.transport.base import Peer

State = Literal["preparing", "committed", "aborted"]


LONGEST_NAME = 200


def reader_name(name: str) -> str:
    """The name of a reader. Raises TypeError or ValueError for one that cannot be."""
    if not isinstance(name, str):
        raise TypeError(f"a reader's name is a string, not {name!r}")
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise ValueError(f"{name!r} cannot name a reader: use 1 to {LONGEST_NAME} printable characters")
    return name


class Reader(msgspec.Struct, frozen=True, array_like=True):
    """A follower of the store with id `holder`. `token` tells it from an earlier follower with the same id.

    A `switched` reader serves what switches commit, another one the latest version. `pinned` are the versions that it
    serves or copies, `ready` those of which it has the bytes, `served` the one that it serves. `must` is the serial of
    the switch that it has to carry out, `acknowledged` of the one that it has carried out; 0 if there is none.
    """

    id: str
    token: str
    holder: str
    peer: Peer
    switched: bool
    pinned: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()
    served: int | None = None
    must: int = 0
    acknowledged: int = 0

    @property
    def pid(self) -> int:
        return self.peer.pid


class SwitchRecord(msgspec.Struct, frozen=True, array_like=True):
    """A proposal that `readers` serve `version`. Once committed or aborted, `state` does not change.

    It is committed once `quorum` readers are ready, or all that live if `quorum` is None. `gone` are readers of
    processes that ended meanwhile, `refused` readers that cannot take the version, with the reasons, `ready` those that
    were ready when it was decided. A process that sees it undecided for `patience` seconds of its own clock may abort
    it.
    """

    serial: int
    token: str
    version: int
    readers: tuple[str, ...]
    quorum: int | None
    patience: float
    proposer: Peer
    state: State = "preparing"
    gone: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    ready: tuple[str, ...] = ()
    reason: str = ""

    @property
    def preparing(self) -> bool:
        return self.state == "preparing"
