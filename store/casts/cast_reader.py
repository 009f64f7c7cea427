"""Reads a version in a cast: fewer bytes of its wider floating-point tensors, all others as they are.

It asks the catalogue for the casts of parts, and waits until holders have packed them.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from holdfast.comms.codecs.float8_blocks import BLOCK
from holdfast.comms.errors import CorruptData, RegionGone
from holdfast.ft.state.boxes import Box, count_of, shape_of, whole
from holdfast.store.casts.wire_cast import (
    EncodedTensor,
    WireCast,
    carried_whole,
    exponents_name,
    form_layout,
    is_cast,
    values_name,
)
from holdfast.store.catalog import part_casts
from holdfast.store.catalog.client import CatalogClient
from holdfast.store.catalog.records import CastForm, Catalog, Replica, Shard
from holdfast.store.data.manifest import Manifest, RegionLayout, TensorEntry
from holdfast.store.errors import CastUnavailable, StoreTimeout
from holdfast.store.read.filling import PartTargets, fill
from holdfast.store.read.part_source import PartSource
from holdfast.store.read.read_plan import plan_into, sources_of
from holdfast.store.read.version_reader import ReadTerms, VersionReader
from holdfast.store.reshard.plan import BoxCopy, BoxTarget, plan

LOOK_SECONDS = 0.2
"""Seconds between two looks for processes that died: no event of the register tells of them."""
STALLED_SECONDS = 5.0
SLOW_CAST = 20e6
"""Bytes a second. A holder that casts more slowly, after `STALLED_SECONDS`, is passed over."""
PATIENT_ROUND = 2
"""The round of `PartSource`: a holder of a form gets its patience, before another holder packs one."""


BATCH_ELEMENTS = 32 << 20
"""About so many elements are decoded at a time: so temporary memory is small."""


@functools.lru_cache(maxsize=16)
def _copies_of(layouts: tuple[RegionLayout, ...], wanted: tuple[BoxTarget, ...], reader: int) -> tuple[BoxCopy, ...]:
    return plan(wanted, sources_of(layouts), reader)


class CastVersionReader(VersionReader):
    """A version that is being read in a cast, which it asks holders for. It raises `CastUnavailable` besides."""

    fills_devices = False

    def __init__(self, terms: ReadTerms, client: CatalogClient, cast: WireCast) -> None:
        super().__init__(terms)
        self._cast, self._client, self._terms = cast, client, terms
        self._began = time.monotonic()
        self._forms: dict[int, tuple[CastForm, PartSource]] = {}
        self._since: dict[tuple[int, str], float] = {}

    def fits(self, stored: TensorEntry, dtype: torch.dtype) -> bool:
        """Besides tensors of its own dtype, float32 and float64 fill floating-point targets: they are always cast."""
        if super().fits(stored, dtype):
            return True
        return stored.dtype in ("float32", "float64") and dtype.is_floating_point and dtype.itemsize > 1

    def prepare(self, targets: Mapping[str, Sequence[BoxTarget]]) -> None:
        """Wait until holders have packed what the targets take. Raises `CastUnavailable`."""
        wanted = [target for each in targets.values() for target in each]
        self._obtain({copy.part for copy in self._copies_of(wanted) if self._is_cast(copy)})

    def fill(self, wanted: Sequence[BoxTarget], into: Mapping[str, torch.Tensor]) -> None:
        """See `VersionReader.fill`."""
        plain, cast = list[BoxTarget](), defaultdict[int, list[BoxCopy]](list)
        for copy in self._copies_of(wanted):
            if self._is_cast(copy):
                cast[copy.part].append(copy)
            else:
                plain.append(BoxTarget(copy.into, copy.name, _box_of(copy), copy.put))
        self._obtain(set(cast))
        if plain:
            super().fill(plain, into)
        for part, copies in cast.items():
            for batch in _batches(copies):
                self._fill_uncast(self._fill_cast(part, batch, into), into)

    def plan_whole(self, names: tuple[str, ...]) -> None:
        """None: what is cast is not copied as it is."""

    def _copies_of(self, wanted: Sequence[BoxTarget]) -> tuple[BoxCopy, ...]:
        return _copies_of(tuple([each.layout for each in self.manifests]), tuple(wanted), self._reader)

    def _is_cast(self, copy: BoxCopy) -> bool:
        layout = self.manifests[copy.part].layout
        return is_cast(layout, layout.numbers[copy.name, copy.source], self._cast)

    def _obtain(self, parts: set[int]) -> None:
        """Have the forms of parts, packed now if there is none, and sources to read them from.

        Raises `CastUnavailable` if no holder can pack one, or none did before the deadline; `RegionGone` if a part is
        gone.
        """
        missing, anew = sorted(parts - self._forms.keys()), True
        shards = [self._sources[part].shard for part in missing]
        while missing:
            at, catalog = self._client.change(lambda now, anew=anew: self._requested(now, shards, anew))  # type: ignore[misc]
            anew = False
            forms = {shard.part: self._form(catalog, shard) for shard in shards}
            if all(form.handle is not None for form in forms.values()):
                sources = [(forms[shard.part], self._source(catalog, shard, forms[shard.part])) for shard in shards]
                self._forms.update(zip(missing, sources, strict=True))
                return
            left = self._terms.deadline - time.monotonic()
            self._check(forms, left)
            if self._client.wait(at, min(left, LOOK_SECONDS)) is None:
                self._client.remove_dead_holders()
                self._pass_over_stalled(catalog, forms)

    def _pass_over(self, part: int, form: CastForm, why: str) -> None:
        """Ask another holder than the maker of a form, which cannot be read or is slow."""
        self._client.change(lambda now: part_casts.decline_cast(now, self.number, part, form, why))

    def _requested(self, catalog: Catalog, shards: Sequence[Shard], anew: bool) -> Catalog:
        for shard in shards:
            catalog = part_casts.request_cast(
                catalog, self.number, shard.part, shard.digest, self._cast.value, anew=anew
            )
        return catalog

    def _form(self, catalog: Catalog, shard: Shard) -> CastForm:
        there = catalog.find(self.number, shard.part, shard.digest)
        found = None if there is None else there[1].cast(self._cast.value)
        if found is None:
            raise RegionGone(f"version {self.number} part {shard.part} was let go before it was cast")
        return found

    def _check(self, forms: Mapping[int, CastForm], left: float) -> None:
        for part, form in forms.items():
            if form.handle is None and (left <= 0 or not form.maker):
                why = [f"holder {holder}: {said}" for holder, said in form.declined]
                why.append(f"holder {form.maker} has not packed it in time" if form.maker else "no other keeps it")
                waited = time.monotonic() - self._began
                raise CastUnavailable(self.number, part, self._cast.value, waited, "; ".join(why))

    def _pass_over_stalled(self, catalog: Catalog, forms: Mapping[int, CastForm]) -> None:
        now = time.monotonic()
        for part, form in forms.items():
            if form.handle is None:
                since = self._since.setdefault((part, form.maker), now)
                patience = STALLED_SECONDS + part_casts.bytes_to_cast(catalog, form.maker) / SLOW_CAST
                if now - since > patience:
                    self._pass_over(part, form, f"it has not packed the part within {now - since:.2g} s")

    def _source(self, catalog: Catalog, shard: Shard, form: CastForm) -> PartSource:
        assert form.handle is not None
        alone = Shard(shard.part, form.digest, form.manifest_at, form.maker, (Replica(form.maker, form.handle),))
        plane, version, deadline = self._terms.plane, self._terms.version, self._terms.deadline
        return PartSource(plane, catalog, version, alone, deadline, lambda *_: None, PATIENT_ROUND)

    def _fill_cast(self, part: int, copies: Sequence[BoxCopy], into: Mapping[str, torch.Tensor]) -> list[BoxCopy]:
        """Read and decode boxes of one part; if its form cannot be read, from that of the next holder.

        Returns the boxes of tensors that the cast cannot carry, which are still to be read.
        """
        while True:
            self._obtain({part})
            form, source = self._forms[part]
            try:
                manifest = source.manifest()
                layout = self.manifests[part].layout
                left = carried_whole(layout, manifest.layout, self._cast)
                if manifest.layout.digest != form_layout(layout, self._cast, left).digest:
                    raise CorruptData(f"{source.what}: a cast to {self._cast.value} of another part")
                cast, uncast = list[BoxCopy](), list[BoxCopy]()
                for copy in copies:
                    (uncast if layout.numbers[copy.name, copy.source] in left else cast).append(copy)
                if cast:
                    self._read(source, manifest, part, cast, into)
            except CastUnavailable:
                raise
            except (RegionGone, CorruptData, StoreTimeout) as error:
                if time.monotonic() >= self._terms.deadline:
                    raise
                self._pass_over(source.shard.part, form, str(error))
                del self._forms[part]
            else:
                return uncast

    def _fill_uncast(self, copies: Sequence[BoxCopy], into: Mapping[str, torch.Tensor]) -> None:
        """Fill boxes from the part itself; the targets may have another floating-point dtype."""
        if not copies:
            return
        staged, wanted = dict[str, torch.Tensor](), list[BoxTarget]()
        for number, copy in enumerate(copies):
            layout = self.manifests[copy.part].layout
            dtype = layout.entries[layout.numbers[copy.name, copy.source]].torch_dtype
            shape = shape_of(copy.take)
            staged[str(number)] = torch.empty(shape, dtype=dtype, device="cpu")
            wanted.append(BoxTarget(str(number), copy.name, _box_of(copy), whole(shape)))
        super().fill(wanted, staged)
        for number, copy in enumerate(copies):
            local = into[copy.into]
            with torch.inference_mode(local.is_inference()):
                local[tuple(slice(low, high) for low, high in copy.put)].copy_(staged[str(number)])

    def _read(
        self,
        source: PartSource,
        manifest: Manifest,
        part: int,
        copies: Sequence[BoxCopy],
        into: Mapping[str, torch.Tensor],
    ) -> None:
        layout = self.manifests[part].layout
        wanted: list[BoxTarget] = []
        staged: dict[str, torch.Tensor] = {}
        for number, copy in enumerate(copies):
            entry = layout.numbers[copy.name, copy.source]
            boxes = [(values_name(entry), copy.take, self._cast.dtype)]
            if self._cast.exponents(shape_of(copy.source)) is not None:
                boxes.append((exponents_name(entry), _blocks(copy.take), torch.int16))
            for name, box, dtype in boxes:
                target = f"{number} {name}"
                staged[target] = torch.empty(shape_of(box), dtype=dtype, device="cpu")
                wanted.append(BoxTarget(target, name, box, whole(shape_of(box))))
        planned = plan_into([manifest.layout], wanted, staged, self._reader)
        fill(source, manifest, PartTargets(planned[0], list(staged.values())))
        for number, copy in enumerate(copies):
            entry = layout.numbers[copy.name, copy.source]
            exponents = staged.get(f"{number} {exponents_name(entry)}")
            encoded = EncodedTensor(staged[f"{number} {values_name(entry)}"], exponents)
            local = into[copy.into]
            with torch.inference_mode(local.is_inference()):
                part_of_local = local[tuple(slice(low, high) for low, high in copy.put)]
                last = shape_of(copy.source)[-1] if copy.source else 1
                first = copy.take[-1][0] % BLOCK if copy.take else 0
                self._cast.decode(encoded, part_of_local, first, last)


def _box_of(copy: BoxCopy) -> Box:
    """The box of the whole tensor that is copied."""
    return tuple((low + at, high + at) for (low, high), (at, _) in zip(copy.take, copy.source, strict=True))


def _blocks(take: Box) -> Box:
    """The blocks of exponents that a box of a tensor touches."""
    if not take:
        return ((0, 1),)
    low, high = take[-1]
    return (*take[:-1], (low // BLOCK, -(-high // BLOCK)))


def _batches(copies: Sequence[BoxCopy]) -> Iterator[list[BoxCopy]]:
    batch, elements = list[BoxCopy](), 0
    for copy in copies:
        if batch and elements + count_of(copy.put) > BATCH_ELEMENTS:
            yield batch
            batch, elements = [], 0
        batch.append(copy)
        elements += count_of(copy.put)
    if batch:
        yield batch
