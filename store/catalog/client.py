"""The clients of a store's register cells: the catalogue, and the groups of readers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, this_host
from holdfast.store.catalog import reader_group, transitions
from holdfast.store.catalog.cell_client import CellClient
from holdfast.store.catalog.host_beats import HostBeats
from holdfast.store.catalog.reader_group import ReaderGroup
from holdfast.store.catalog.records import Catalog

DEFAULT = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)


def cell_of(name: str) -> str:
    """The register's cell for the store `name`. Raises ValueError for a name that cannot be one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a store: use 1 to 63 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return "store" if name == DEFAULT else f"store/{name}"


class CatalogClient(CellClient[Catalog]):
    """The catalogue of the store `name` at a register URL."""

    def __init__(
        self, url: str, changed: Callable[[Catalog, Catalog], None], name: str = DEFAULT, patience: float = 0.0
    ) -> None:
        super().__init__(url, cell_of(name), Catalog(), Catalog.decode, changed, patience)
        self.name = name

    def remove_dead_holders(self) -> tuple[int, Catalog]:
        """Remove the dead processes of this host from the catalogue."""
        version, catalog = self.read()
        dead = gone(catalog.peers())
        return self.change(lambda now: transitions.remove_dead_holders(now, dead)) if dead else (version, catalog)


class BeatsClient(CellClient[HostBeats]):
    """The beats of the hosts of the store `name`."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url, f"{cell_of(name)}/beats", HostBeats(), HostBeats.decode)


class GroupClient(CellClient[ReaderGroup]):
    """The group of reader hosts to which a host belongs, of the store `name`."""

    def __init__(self, url: str, name: str, host: str) -> None:
        cell = f"{cell_of(name)}/readers/{reader_group.group_of(host)}"
        super().__init__(url, cell, ReaderGroup(), ReaderGroup.decode)

    def remove_dead_readers(self) -> tuple[int, ReaderGroup]:
        """Remove the dead processes of this host from the group."""
        version, group = self.read()
        dead = gone(each.peer for each in group.readers)
        ids = {each.id for each in group.readers if each.peer in dead}
        return self.change(lambda now: reader_group.remove(now, ids)) if ids else (version, group)


def gone(peers: Iterable[Peer]) -> frozenset[Peer]:
    """The processes of `peers` that are on this host and have ended."""
    return frozenset(peer for peer in peers if peer.host == this_host() and is_gone(peer))
