"""Which holder packs which cast of a part, as pure transitions of the catalogue.

A reader asks for a cast (`request_cast`). One of the part's holders is assigned, packs the cast form beside its
replica, and lists it (`announce_cast`). If that holder dies or leaves, the next one is assigned. A form that is listed
stays for as long as the replica of its holder, or until it is withdrawn: by its maker, which cannot pack it, or by a
reader that cannot read it.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash
from msgspec.structs import replace

from holdfast.store.catalog.records import CastForm, Catalog, Shard, Version


def request_cast(catalog: Catalog, number: int, part: int, digest: bytes, cast: str) -> Catalog:
    """Ask for a cast of a part. Changes nothing if it is listed, or a holder packs it already."""
    found = catalog.find(number, part, digest)
    if found is None or found[1].cast(cast) is not None:
        return catalog
    return _with_casts(catalog, *found, _assigned(catalog, found[1], CastForm(cast)))


def announce_cast(catalog: Catalog, number: int, part: int, digest: bytes, form: CastForm) -> Catalog:
    """List a form that its maker has packed and exposed. Changes nothing if another holder was asked meanwhile."""
    found = catalog.find(number, part, digest)
    known = None if found is None else found[1].cast(form.cast)
    if found is None or known is None or known.maker != form.maker or known.handle is not None:
        return catalog
    return _with_casts(catalog, *found, form)


def withdraw_cast(catalog: Catalog, number: int, part: int, form: CastForm) -> Catalog:
    """Drop a form, unless it is another one by now; the next reader asks anew."""
    found = catalog.find(number, part)
    known = None if found is None else found[1].cast(form.cast)
    if found is None or known is None or (known.maker, known.handle) != (form.maker, form.handle):
        return catalog
    return _with_casts(catalog, *found, without=form.cast)


def settled_casts(catalog: Catalog, shard: Shard) -> Shard:
    """The part after all changes that follow from others: stores that leave or are gone, replicas that went."""
    there = {each.holder for each in shard.replicas}
    left = (each for each in shard.casts if each.handle is None or each.maker in there)
    return replace(shard, casts=tuple(_assigned(catalog, shard, each) for each in left))


def casts_of(catalog: Catalog, holder_id: str, *, packed: bool) -> Iterator[tuple[Version, Shard, CastForm]]:
    """The forms that a holder has packed, or is to pack."""
    for version in catalog.versions:
        for shard in version.shards:
            for form in shard.casts:
                if form.maker == holder_id and (form.handle is not None) == packed:
                    yield version, shard, form


def _assigned(catalog: Catalog, shard: Shard, form: CastForm) -> CastForm:
    """The form with a maker, if a holder that stays has the part."""
    if form.handle is not None:
        return form
    able = [each.holder for each in shard.replicas if (holder := catalog.holder(each.holder)) and catalog.stays(holder)]
    if form.maker in able:
        return form
    able.sort(key=lambda each: xxhash.xxh3_64_intdigest(shard.digest + each.encode()))
    return replace(form, maker=able[0] if able else "")


def _with_casts(catalog: Catalog, version: Version, shard: Shard, *forms: CastForm, without: str = "") -> Catalog:
    """The catalogue with forms of a part in place of those of their casts."""
    known = {each.cast: each for each in (*shard.casts, *forms) if each.cast != without}
    casts = tuple(known[cast] for cast in sorted(known))
    return catalog.with_version(version.with_shard(replace(shard, casts=casts)))
