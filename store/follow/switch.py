"""Makes all readers of a fleet serve one version, or none of them: the side of the proposer."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.comms.errors import HoldfastError
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog import fleet
from holdfast.store.catalog.client import CatalogClient, check_cancelled
from holdfast.store.catalog.fleet import find_switch, preparing
from holdfast.store.catalog.records import Catalog, SwitchRecord
from holdfast.store.errors import StoreTimeout

LOOK_SECONDS = 0.1
"""Seconds between looks at the processes of this host while readers prepare."""
_log = logging.getLogger("holdfast.store")


@dataclass(frozen=True, slots=True)
class SwitchResult:
    """How a switch ended. If `committed`, each reader serves `version` from its next batch on; else none does.

    `ready` are the readers that had the version when that was decided, `missing` the others: those must catch up before
    they serve again; `refused` are those of them that cannot take it. `reason` says why a switch was aborted.
    """

    version: int
    committed: bool
    ready: tuple[str, ...]
    missing: tuple[str, ...]
    reason: str = ""
    refused: tuple[str, ...] = ()


class SwitchProposer:
    """Proposes one switch, and waits for its end."""

    def __init__(self, client: CatalogClient, peer: Peer, observe: Callable[[str], None]) -> None:
        self._client, self._peer, self._observe = client, peer, observe
        self._token = secrets.token_hex(6)

    def run(self, version: int, readers: Sequence[str] | None, quorum: int | None, timeout: float) -> SwitchResult:
        """Propose, and wait until readers or deaths decide; after `timeout` seconds abort.

        While another switch is undecided this one waits for its turn. On any error it is aborted, unless it was
        committed by then.
        """
        began = time.monotonic()
        deadline = began + timeout

        def propose(now: Catalog) -> Catalog:
            patience = max(deadline - time.monotonic(), 0.0)
            return fleet.propose(now, self._token, version, readers, quorum, patience, self._peer)

        self._client.remove_dead_holders()
        try:
            at, catalog = self._client.change(propose)
            while (mine := find_switch(catalog, self._token)) is None:
                other = preparing(catalog)
                if time.monotonic() >= deadline:
                    why = (
                        "another one is undecided" if other is None else f"one to version {other.version} is undecided"
                    )
                    raise StoreTimeout("switch", version, time.monotonic() - began, f"{why}; nothing was proposed")
                self._look(at, deadline)
                at, catalog = self._client.change(propose)
            self._observe("switch_proposed")
            while mine.preparing and time.monotonic() < deadline:
                at, catalog = self._look(at, deadline)
                mine = self._own(catalog, version, began)
            if mine.preparing:
                waited = f"not all readers were ready after {timeout:.3g} s"
                mine = self._own(self._abort(waited), version, began)
        except BaseException as error:
            try:
                self._abort(f"its proposer gave up: {type(error).__name__}")
            except HoldfastError as also:
                _log.warning("a switch to version %d is left undecided for now: %s", version, also)
            raise
        self._observe(f"switch_{mine.state}")
        missing = tuple(name for name in mine.readers if name not in mine.ready)
        refused = tuple(name for name, _ in mine.refused)
        return SwitchResult(version, mine.state == "committed", mine.ready, missing, mine.reason, refused)

    def _look(self, at: int, deadline: float) -> tuple[int, Catalog]:
        """Wait a little for a change, and count dead processes out."""
        check_cancelled()
        self._client.wait(at, min(LOOK_SECONDS, deadline - time.monotonic()))
        return self._client.remove_dead_holders()

    def _own(self, catalog: Catalog, version: int, began: float) -> SwitchRecord:
        mine = find_switch(catalog, self._token)
        if mine is None:
            why = f"{fleet.DECISIONS} later switches were decided meanwhile, and the end of this one is forgotten"
            raise StoreTimeout("switch", version, time.monotonic() - began, f"{why}; look at readers()")
        return mine

    def _abort(self, why: str) -> Catalog:
        return self._client.change(lambda now: fleet.abort(now, self._token, why))[1]
