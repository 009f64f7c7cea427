"""Reads a version in a cast: fewer bytes of its wider floating-point tensors, all others as they are.

It asks the catalogue for the casts of parts, and waits for holders to pack them, for half of its time at most. A part
that has no form by then, or one that cannot be read, is read whole and cast here.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

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
from holdfast.store.data.manifest import RegionLayout, TensorEntry
from holdfast.store.errors import StoreTimeout
from holdfast.store.read.filling import PartTargets, fill
from holdfast.store.read.part_source import PartSource
from holdfast.store.read.read_plan import plan_into, sources_of
from holdfast.store.read.version_reader import ReadTerms, VersionReader
from holdfast.store.reshard.plan import BoxCopy, BoxTarget, plan

LOOK_SECONDS = 0.2
"""Seconds between two looks for processes that died: no event of the register tells of them."""
PACK_SECONDS = 5.0
SLOW_CAST = 20e6
"""Bytes a second. Holders that cast more slowly, after `PACK_SECONDS`, are not waited for."""
PATIENT_ROUND = 2
"""The round of `PartSource`: a holder of a form gets its patience, before the part is read whole."""
BATCH_ELEMENTS = 32 << 20
"""About so many elements are decoded at a time: so temporary memory is small."""
_log = logging.getLogger("holdfast.store")


@functools.lru_cache(maxsize=16)
def _copies_of(layouts: tuple[RegionLayout, ...], wanted: tuple[BoxTarget, ...], reader: int) -> tuple[BoxCopy, ...]:
    return plan(wanted, sources_of(layouts), reader)


class CastVersionReader(VersionReader):
    """A version that is being read in a cast, which it asks holders for."""

    fills_devices = False

    def __init__(self, terms: ReadTerms, client: CatalogClient, cast: WireCast) -> None:
        super().__init__(terms)
        self._cast, self._client, self._terms = cast, client, terms
        self._forms: dict[int, tuple[CastForm, PartSource] | None] = {}
        """The form of each part, and where it is read; None if it cannot be had."""

    def fits(self, stored: TensorEntry, dtype: torch.dtype) -> bool:
        """Besides tensors of its own dtype, float32 and float64 fill floating-point targets: they are always cast."""
        if super().fits(stored, dtype):
            return True
        return stored.dtype in ("float32", "float64") and dtype.is_floating_point and dtype.itemsize > 1

    def prepare(self, targets: Mapping[str, Sequence[BoxTarget]]) -> None:
        """Wait for the forms of all that the targets take, before one of them is changed."""
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
                self._fill_cast(part, batch, into)

    def plan_whole(self, names: tuple[str, ...]) -> None:
        """None: what is cast is not copied as it is."""

    def _copies_of(self, wanted: Sequence[BoxTarget]) -> tuple[BoxCopy, ...]:
        return _copies_of(tuple([each.layout for each in self.manifests]), tuple(wanted), self._reader)

    def _is_cast(self, copy: BoxCopy) -> bool:
        layout = self.manifests[copy.part].layout
        return is_cast(layout, layout.numbers[copy.name, copy.source], self._cast)

    def _obtain(self, parts: set[int]) -> None:
        """Find the forms of parts, packed now if there is none, as long as half of the time is left."""
        missing = sorted(parts - self._forms.keys())
        if not missing:
            return
        shards = [self._sources[part].shard for part in missing]
        began, nbytes = time.monotonic(), sum(self._sources[part].nbytes for part in missing)
        until = began + min((self._terms.deadline - began) / 2, PACK_SECONDS + nbytes / SLOW_CAST)
        at, catalog = self._client.change(lambda now: self._requested(now, shards))
        while any(self._is_awaited(catalog, shard) for shard in shards) and (left := until - time.monotonic()) > 0:
            at, catalog = self._client.wait(at, min(left, LOOK_SECONDS)) or self._client.remove_dead_holders()
        for part, shard in zip(missing, shards, strict=True):
            form = self._form(catalog, shard)
            if form is None or form.handle is None:
                self._forms[part] = None
            else:
                self._forms[part] = form, self._source(catalog, shard, form)
        if lacking := ", ".join(str(part) for part in missing if self._forms[part] is None):
            _log.warning(
                "version %d part %s is read whole, and cast here: no holder has packed it", self.number, lacking
            )

    def _requested(self, catalog: Catalog, shards: Collection[Shard]) -> Catalog:
        for shard in shards:
            catalog = part_casts.request_cast(catalog, self.number, shard.part, shard.digest, self._cast.value)
        return catalog

    def _form(self, catalog: Catalog, shard: Shard) -> CastForm | None:
        there = catalog.find(self.number, shard.part, shard.digest)
        return None if there is None else there[1].cast(self._cast.value)

    def _is_awaited(self, catalog: Catalog, shard: Shard) -> bool:
        form = self._form(catalog, shard)
        return form is not None and form.handle is None and form.maker != ""

    def _source(self, catalog: Catalog, shard: Shard, form: CastForm) -> PartSource:
        assert form.handle is not None
        alone = Shard(shard.part, form.digest, form.manifest_at, form.maker, (Replica(form.maker, form.handle),))
        plane, version, deadline = self._terms.plane, self._terms.version, self._terms.deadline
        return PartSource(plane, catalog, version, alone, deadline, lambda *_: None, PATIENT_ROUND)

    def _fill_cast(self, part: int, copies: Sequence[BoxCopy], into: Mapping[str, torch.Tensor]) -> None:
        """Read and decode boxes of one part: from its form, else of the part itself."""
        if (packed := self._forms[part]) is not None:
            form, source = packed
            try:
                self._fill_from_form(part, source, copies, into)
            except (RegionGone, CorruptData, StoreTimeout) as error:
                if time.monotonic() >= self._terms.deadline:
                    raise
                _log.warning("%s is read whole, and cast here: %s", self._sources[part].what, error)
                self._client.change(lambda now: part_casts.withdraw_cast(now, self.number, source.shard.part, form))
                self._forms[part] = None
            else:
                return
        self._fill_here(part, copies, into)

    def _fill_from_form(
        self, part: int, source: PartSource, copies: Sequence[BoxCopy], into: Mapping[str, torch.Tensor]
    ) -> None:
        manifest, layout = source.manifest(), self.manifests[part].layout
        form = manifest.layout
        if form.digest != form_layout(layout, self._cast, carried_whole(layout, form)).digest:
            raise CorruptData(f"{source.what}: a cast to {self._cast.value} of another part")
        wanted: list[BoxTarget] = []
        staged: dict[str, torch.Tensor] = {}
        for number, copy in enumerate(copies):
            entry = layout.numbers[copy.name, copy.source]
            for name, box in ((values_name(entry), copy.take), (exponents_name(entry), _blocks(copy.take))):
                if name in form.by_name:
                    target, dtype = f"{number} {name}", form.by_name[name][0].torch_dtype
                    staged[target] = torch.empty(shape_of(box), dtype=dtype, device="cpu")
                    wanted.append(BoxTarget(target, name, box, whole(shape_of(box))))
        planned = plan_into([form], wanted, staged, self._reader)
        fill(source, manifest, PartTargets(planned[0], list(staged.values())))
        for number, copy in enumerate(copies):
            entry = layout.numbers[copy.name, copy.source]
            exponents = staged.get(f"{number} {exponents_name(entry)}")
            self._decode(copy, EncodedTensor(staged[f"{number} {values_name(entry)}"], exponents), into)

    def _fill_here(self, part: int, copies: Sequence[BoxCopy], into: Mapping[str, torch.Tensor]) -> None:
        """Read what the part has of each tensor, encode that as a holder does, and decode the boxes."""
        layout, of_entry = self.manifests[part].layout, defaultdict[int, list[BoxCopy]](list)
        for copy in copies:
            of_entry[layout.numbers[copy.name, copy.source]].append(copy)
        for number, boxes in of_entry.items():
            entry = layout.entries[number]
            read = torch.empty(entry.extent, dtype=entry.torch_dtype, device="cpu")
            super().fill([BoxTarget("", entry.name, boxes[0].source, whole(entry.extent))], {"": read})
            encoded = EncodedTensor(read)
            if self._cast.carries(read):
                shape = self._cast.exponents(entry.extent)
                exponents = None if shape is None else torch.empty(shape, dtype=torch.int16, device="cpu")
                encoded = EncodedTensor(torch.empty(entry.extent, dtype=self._cast.dtype, device="cpu"), exponents)
                self._cast.encode(read, encoded)
            for copy in boxes:
                values = _in_box(encoded.values, copy.take)
                scales = None if encoded.exponents is None else _in_box(encoded.exponents, _blocks(copy.take))
                self._decode(copy, EncodedTensor(values, scales), into)

    def _decode(self, copy: BoxCopy, encoded: EncodedTensor, into: Mapping[str, torch.Tensor]) -> None:
        local = into[copy.into]
        with torch.inference_mode(local.is_inference()):
            last = shape_of(copy.source)[-1] if copy.source else 1
            first = copy.take[-1][0] % BLOCK if copy.take else 0
            self._cast.decode(encoded, _view(local, copy.put), first, last)


def _view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(low, high) for low, high in box)]


def _in_box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a tensor, contiguous; the exponents of a tensor without dimensions have one."""
    return _view(tensor, box).contiguous()


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
