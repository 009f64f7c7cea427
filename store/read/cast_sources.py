"""Finds the casts of parts for a reader. It asks the catalogue for them, and waits until holders have packed them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from holdfast.comms.errors import RegionGone
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.store.casts.wire_cast import WireCast
from holdfast.store.catalog import part_casts
from holdfast.store.catalog.client import CatalogClient
from holdfast.store.catalog.records import CastForm, Catalog, Replica, Shard, Version
from holdfast.store.errors import CastUnavailable
from holdfast.store.read.part_source import PartSource

LOOK_SECONDS = 0.2
"""Seconds between two looks for processes that died: no event of the register tells of them."""
STALLED_SECONDS = 5.0
SLOW_CAST = 20e6
"""Bytes a second. A holder that casts more slowly, after `STALLED_SECONDS`, is passed over."""
PATIENT_ROUND = 2
"""The round of `PartSource`: a holder of a form gets its patience, before another holder packs one."""


class CastSources:
    """The sources of one cast of a version's parts. For one thread."""

    def __init__(
        self, client: CatalogClient, plane: MemoryPlane, cast: WireCast, version: Version, deadline: float
    ) -> None:
        self.cast = cast
        self._client, self._plane, self._version, self._deadline = client, plane, version, deadline
        self._began = time.monotonic()
        self._since: dict[tuple[int, str], float] = {}

    def obtain(self, shards: Sequence[Shard]) -> list[tuple[CastForm, PartSource]]:
        """The form of each part, packed now if there is none, and a source to read it from.

        Raises `CastUnavailable` if no holder can pack one, or none did before the deadline; `RegionGone` if a part is
        gone.
        """
        anew = True
        while True:
            at, catalog = self._client.change(lambda now, anew=anew: self._requested(now, shards, anew))  # type: ignore[misc]
            anew = False
            forms = {shard.part: self._form(catalog, shard) for shard in shards}
            if all(form.handle is not None for form in forms.values()):
                return [(forms[shard.part], self._source(catalog, shard, forms[shard.part])) for shard in shards]
            left = self._deadline - time.monotonic()
            self._check(forms, left)
            if self._client.wait(at, min(left, LOOK_SECONDS)) is None:
                self._client.remove_dead_holders()
                self._pass_over_stalled(catalog, forms)

    def pass_over(self, part: int, form: CastForm, why: str) -> None:
        """Ask another holder than the maker of a form, which cannot be read or is slow."""
        self._client.change(lambda now: part_casts.decline_cast(now, self._version.number, part, form, why))

    def _requested(self, catalog: Catalog, shards: Sequence[Shard], anew: bool) -> Catalog:
        for shard in shards:
            catalog = part_casts.request_cast(
                catalog, self._version.number, shard.part, shard.digest, self.cast.value, anew=anew
            )
        return catalog

    def _form(self, catalog: Catalog, shard: Shard) -> CastForm:
        there = catalog.shard(self._version.number, shard.part)
        found = None if there is None or there.digest != shard.digest else there.cast(self.cast.value)
        if found is None:
            raise RegionGone(f"version {self._version.number} part {shard.part} was let go before it was cast")
        return found

    def _check(self, forms: Mapping[int, CastForm], left: float) -> None:
        for part, form in forms.items():
            if form.handle is None and (left <= 0 or not form.maker):
                why = [f"holder {holder}: {said}" for holder, said in form.declined]
                why.append(f"holder {form.maker} has not packed it in time" if form.maker else "no other keeps it")
                waited = time.monotonic() - self._began
                raise CastUnavailable(self._version.number, part, self.cast.value, waited, "; ".join(why))

    def _pass_over_stalled(self, catalog: Catalog, forms: Mapping[int, CastForm]) -> None:
        now = time.monotonic()
        for part, form in forms.items():
            if form.handle is None:
                since = self._since.setdefault((part, form.maker), now)
                patience = STALLED_SECONDS + part_casts.bytes_to_cast(catalog, form.maker) / SLOW_CAST
                if now - since > patience:
                    self.pass_over(part, form, f"it has not packed the part within {now - since:.2g} s")

    def _source(self, catalog: Catalog, shard: Shard, form: CastForm) -> PartSource:
        assert form.handle is not None
        alone = Shard(shard.part, form.digest, form.manifest_at, form.maker, (Replica(form.maker, form.handle),))
        return PartSource(self._plane, catalog, self._version, alone, self._deadline, lambda *_: None, PATIENT_ROUND)
