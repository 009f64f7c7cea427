"""Which holder packs which cast of a part, as pure transitions of the catalogue.

A reader asks for a cast (`request_cast`). One of the part's holders is assigned, packs the cast form beside its
replica, and lists it (`announce_cast`). If that holder dies, leaves or declines, the next one is assigned. A form that
is listed stays for as long as the replica of its holder.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash
from msgspec.structs import replace

from holdfast.store.catalog.records import CastForm, Catalog, Shard, Version


def request_cast(catalog: Catalog, number: int, part: int, digest: bytes, cast: str, *, anew: bool) -> Catalog:
    """Ask for a cast of a part. Changes nothing if it is listed, or a holder packs it already.

    With `anew`, holders that declined are asked again if no other is left.
    """
    if (found := catalog.find(number, part, digest)) is None:
        return catalog
    version, shard = found
    form = shard.cast(cast) or CastForm(cast)
    if anew and not form.maker:
        form = CastForm(cast)
    return _with_form(catalog, version, shard, form)


def announce_cast(catalog: Catalog, number: int, part: int, digest: bytes, form: CastForm) -> Catalog:
    """List a form that its maker has packed and exposed. Changes nothing if another holder was asked meanwhile."""
    if (found := catalog.find(number, part, digest)) is None:
        return catalog
    version, shard = found
    known = shard.cast(form.cast)
    if known is None or known.maker != form.maker or known.handle is not None:
        return catalog
    return _with_form(catalog, version, shard, replace(form, declined=known.declined))


def decline_cast(catalog: Catalog, number: int, part: int, form: CastForm, why: str) -> Catalog:
    """Pass over the maker of a form, which cannot pack it, is too slow, or packed what cannot be read."""
    if (found := catalog.find(number, part)) is None:
        return catalog
    version, shard = found
    known = shard.cast(form.cast)
    if known is None or (known.maker, known.handle) != (form.maker, form.handle):
        return catalog
    return _with_form(catalog, version, shard, CastForm(form.cast, declined=(*known.declined, (form.maker, why))))


def settled_casts(catalog: Catalog, shard: Shard) -> Shard:
    """The part after all changes that follow from others: stores that leave or are gone, replicas that went."""
    there = {each.holder for each in shard.replicas}
    left = (each for each in shard.casts if each.handle is None or each.maker in there)
    return replace(shard, casts=tuple(_assigned(catalog, shard, each) for each in left))


def casts_to_make(catalog: Catalog, holder_id: str) -> Iterator[tuple[Version, Shard, CastForm]]:
    """The forms that a holder is to pack."""
    for version, shard, form in _forms_of(catalog, holder_id):
        if form.handle is None:
            yield version, shard, form


def casts_listed(catalog: Catalog, holder_id: str) -> Iterator[tuple[Version, Shard, CastForm]]:
    """The forms that a holder has packed."""
    for version, shard, form in _forms_of(catalog, holder_id):
        if form.handle is not None:
            yield version, shard, form


def bytes_to_cast(catalog: Catalog, holder_id: str) -> int:
    """The bytes of the parts that a holder is to cast."""
    return sum(shard.replicas[0].handle.nbytes for _, shard, _ in casts_to_make(catalog, holder_id))


def _forms_of(catalog: Catalog, holder_id: str) -> Iterator[tuple[Version, Shard, CastForm]]:
    for version in catalog.versions:
        for shard in version.shards:
            for form in shard.casts:
                if form.maker == holder_id:
                    yield version, shard, form


def _assigned(catalog: Catalog, shard: Shard, form: CastForm) -> CastForm:
    """The form with a maker, if a holder that stays has the part and has not declined."""
    if form.handle is not None:
        return form
    declined = {holder for holder, _ in form.declined}
    able = [
        each.holder
        for each in shard.replicas
        if each.holder not in declined and (holder := catalog.holder(each.holder)) and catalog.stays(holder)
    ]
    if form.maker in able:
        return form
    able.sort(key=lambda each: xxhash.xxh3_64_intdigest(shard.digest + each.encode()))
    return replace(form, maker=able[0] if able else "")


def _with_form(catalog: Catalog, version: Version, shard: Shard, form: CastForm) -> Catalog:
    casts = (*(each for each in shard.casts if each.cast != form.cast), _assigned(catalog, shard, form))
    changed = replace(shard, casts=tuple(sorted(casts, key=lambda each: each.cast)))
    return catalog.with_version(version.with_shard(changed))
