"""`Layout`: how the names and shapes of a reader's state dict are made of those of the publisher's.

One layout serves both directions: of a fused tensor and its components, whichever the version has is read. In patterns
of dotted names `*` stands for one word between dots, `**` for any number of them.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.ft.state.boxes import Box, common, count_of, cover, moved, whole
from holdfast.store.reshard.placements import Blocks, PlacedTensor
from holdfast.store.reshard.plan import BoxTarget, listed, spelt

_WILDCARDS = re.compile(r"\*\*|\*")
_WORDS = {"**": "(.+)", "*": r"([^.]+)"}


@lru_cache(maxsize=1 << 10)
def _compiled(pattern: str) -> re.Pattern[str]:
    literals = map(re.escape, _WILDCARDS.split(pattern))
    words = [_WORDS[each] for each in wildcards(pattern)] + [""]
    return re.compile("".join(part for pair in zip(literals, words, strict=True) for part in pair))


def wildcards(pattern: str) -> list[str]:
    """The wildcards of a pattern, in order."""
    return _WILDCARDS.findall(pattern)


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the wildcards of a pattern stand for in a name; None if it does not match."""
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else found.groups()


def fill(pattern: str, words: tuple[str, ...]) -> str:
    """The name that a pattern gives with these words for its wildcards."""
    literals = _WILDCARDS.split(pattern)
    return "".join(part for pair in zip(literals, (*words, ""), strict=True) for part in pair)


@dataclass(frozen=True, slots=True)
class Component:
    """One of the tensors that are joined. `name` is a pattern with the wildcards of the joined tensor's name.

    `length` is its length along the dimension where they are joined; with it, one component of a fused tensor can be
    read alone. In a tensor-parallel reader, `copies` ranks hold the same slice of it.
    """

    name: str
    length: int | None = None
    copies: int = 1


@dataclass(frozen=True, slots=True)
class NameRule:
    """Tensors named `joined` consist of `components`, one after the other along `dim`.

    Of one component, `joined` is another name. In a tensor-parallel reader, each rank has a slice of each component if
    `sliced`. If `padded`, the joined tensor may be longer than its component; what is left over is not filled.
    """

    joined: str
    components: tuple[Component, ...]
    dim: int = 0
    sliced: bool = False
    padded: bool = False

    @staticmethod
    def rename(name: str, source: str) -> NameRule:
        """A rule for tensors that are called `name` on one side, and `source` on the other."""
        return NameRule(name, (Component(source),))

    @staticmethod
    def fuse(joined: str, *components: str, dim: int = 0) -> NameRule:
        """A rule for tensors that are components on one side, and on the other one tensor, joined along `dim`."""
        return NameRule(joined, tuple(map(Component, components)), dim)


Shape = tuple[int, ...]


class NameRegion(NamedTuple):
    """A box of a wanted tensor, and the box of the source `name` that goes there."""

    wanted: Box
    name: str
    source: Box


class _Slot(NamedTuple):
    """Where a component lies: from `start` on, for `length`, along the dimension of its rule, in the source `name`."""

    name: str
    start: int
    length: int


def both_ways(tied: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The other name of each tied one."""
    return {name: other for pair in tied for name, other in (pair, pair[::-1])}


class Resolver:
    """Finds the regions of wanted tensors among those `there`; `faults` says what is wrong, in words."""

    def __init__(
        self,
        rules: Sequence[NameRule],
        tied: Iterable[tuple[str, str]],
        rank: int,
        size: int,
        wanted: Mapping[str, Shape],
        there: Mapping[str, Shape],
    ) -> None:
        self.faults: list[str] = []
        self._rules, self._tied, self._rank, self._size = rules, both_ways(tied), rank, size
        self._wanted, self._there = wanted, there

    def regions(self, name: str) -> list[NameRegion]:
        """The regions that make up a wanted tensor; none, and a fault, if that is not possible."""
        missing: dict[str, None] = {}
        for rule in self._rules:
            words = match(rule.joined, name)
            if words is None:
                continue
            names = [fill(component.name, words) for component in rule.components]
            found = [source for each in names if (source := self._source(each)) is not None]
            if len(found) == len(names):
                return self._join(name, rule, [self._all_of(each, rule.dim) for each in found])
            fused = self._source(name)
            if fused is not None and rule.sliced and self._size > 1:
                return self._join(name, rule, self._slots(rule, names, fused))
            missing |= {each: None for each in names if self._source(each) is None}
        for rule in self._rules:
            for number, component in enumerate(rule.components):
                words = match(component.name, name)
                fused = None if words is None else self._source(fill(rule.joined, words))
                if words is not None and fused is not None:
                    slots = self._slots(rule, [fill(each.name, words) for each in rule.components], fused)
                    return self._put(name, rule.dim, slots[number : number + 1])
        source = self._source(name)
        if source is not None:
            return self._put(name, 0, [self._all_of(source, 0)])
        made = f", nor {', '.join(map(repr, missing))} to make it of" * bool(missing)
        return self._fault(f"there is no {name!r}{made}")

    def _source(self, name: str) -> str | None:
        """The name of a tensor that is there, or of one that is tied to it."""
        other = self._tied.get(name)
        return name if name in self._there else other if other in self._there else None

    def _all_of(self, source: str, dim: int) -> _Slot:
        shape = self._there[source]
        return _Slot(source, 0, shape[dim] if dim < len(shape) else 1)

    def _slots(self, rule: NameRule, names: Sequence[str], fused: str) -> list[_Slot]:
        """Where the components called `names` lie in a joined tensor; none, and a fault, if that is not known."""
        total = self._all_of(fused, rule.dim).length
        lengths = [
            self._length(component, name, rule.dim) for component, name in zip(rule.components, names, strict=True)
        ]
        unknown = [name for name, length in zip(names, lengths, strict=True) if length is None]
        known = sum(length for length in lengths if length is not None)
        if len(unknown) > 1:
            self._fault(
                f"nothing says how long {' and '.join(map(repr, unknown))} are in {fused!r}: give their lengths"
            )
            return []
        lasts = [total - known if length is None else length for length in lengths]
        if min(lasts) < 0 or (sum(lasts) > total if rule.padded else sum(lasts) != total):
            self._fault(f"{fused!r} is {total} long along dimension {rule.dim}, its components are {lasts}")
            return []
        ends = list(itertools.accumulate(lasts, initial=0))
        return [_Slot(fused, start, length) for start, length in zip(ends, lasts, strict=False)]

    def _length(self, component: Component, name: str, dim: int) -> int | None:
        shape = self._wanted.get(name, ())
        return component.length if component.length is not None else shape[dim] if dim < len(shape) else None

    def _join(self, name: str, rule: NameRule, slots: Sequence[_Slot]) -> list[NameRegion]:
        """The regions of a wanted tensor that consists of these slots, or of this rank's slice of each."""
        if not slots:
            return []
        if rule.padded:
            return self._pad(name, rule, slots[0])
        for component, slot in zip(rule.components, slots, strict=True):
            if component.length not in (None, slot.length):
                return self._fault(f"{slot.name!r} is {slot.length} long, the layout says {component.length}")
        if not rule.sliced or self._size == 1:
            return self._put(name, rule.dim, slots)
        mine = []
        for component, slot in zip(rule.components, slots, strict=True):
            slices = self._size // component.copies
            if slot.length % slices:
                return self._fault(f"{slot.name!r}, {slot.length} long along {rule.dim}, is not divided by {slices}")
            length = slot.length // slices
            mine.append(_Slot(slot.name, slot.start + self._rank // component.copies * length, length))
        return self._put(name, rule.dim, mine)

    def _pad(self, name: str, rule: NameRule, slot: _Slot) -> list[NameRegion]:
        """The region of a wanted tensor that, over all ranks, is as long as its only component or longer."""
        length = slot.length if rule.components[0].length is None else rule.components[0].length
        room = self._wanted[name][rule.dim] if rule.dim < len(self._wanted[name]) else 1
        ranks, rank = (self._size, self._rank) if rule.sliced else (1, 0)
        if not length <= min(slot.length, room * ranks):
            return self._fault(
                f"{name!r} has room for {room * ranks} along dimension {rule.dim}, in the version {slot.name!r} has "
                f"{slot.length}; the layout says {length}"
            )
        begin, end = min(rank * room, length), min((rank + 1) * room, length)
        return self._put(name, rule.dim, [_Slot(slot.name, begin, end - begin)], padded=True)

    def _put(self, name: str, dim: int, slots: Sequence[_Slot], *, padded: bool = False) -> list[NameRegion]:
        """The regions of a wanted tensor that is filled by slots, one after the other along `dim`."""
        shape, at, regions = self._wanted[name], 0, []
        for source, start, length in slots:
            there = self._there[source]
            if _except(there, dim) != _except(shape, dim):
                return self._fault(f"{name!r} has shape {shape} here, in the version {source!r} has {tuple(there)}")
            regions.append(NameRegion(_range(shape, dim, at, length), source, _range(there, dim, start, length)))
            at += length
        if slots and shape[dim : dim + 1] != (at,) and shape and not padded:
            have = ", ".join(dict.fromkeys(f"{source!r} has {tuple(self._there[source])}" for source, _, _ in slots))
            return self._fault(f"{name!r} has shape {shape} here, in the version {have}")
        return regions

    def _fault(self, said: str) -> list[NameRegion]:
        self.faults.append(said)
        return []


def _except(shape: Shape, dim: int) -> tuple[int, Shape]:
    """The number of dimensions, and the sizes of all but one."""
    return len(shape), (*shape[:dim], *shape[dim + 1 :])


def _range(shape: Shape, dim: int, start: int, length: int) -> Box:
    """The box of all but one dimension, and of a range along that one."""
    box = whole(shape)
    return (*box[:dim], (start, start + length), *box[dim + 1 :]) if box else box


@dataclass(frozen=True, slots=True)
class Layout:
    """The map between the names of two state dicts. A name that no rule fits stays the same.

    Of several rules for a name, the first is taken for which the version has the tensors. `tied` are pairs of names of
    one weight, of which the version may have either. A tensor-parallel reader is rank `rank` of `size`. Raises
    ValueError for rules that cannot be meant.
    """

    rules: tuple[NameRule, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        faults = [f"rank {self.rank} of {self.size}"] if not 0 <= self.rank < self.size else []
        for rule in self.rules:
            words, names = wildcards(rule.joined), [component.name for component in rule.components]
            odd = [name for name in names if wildcards(name) != words]
            faults += [f"{rule.joined!r} and {name!r} have different wildcards" for name in odd]
            if not rule.components:
                faults.append(f"{rule.joined!r} consists of nothing")
            if rule.padded and len(rule.components) != 1:
                faults.append(f"{rule.joined!r} is padded, and has {len(rule.components)} components")
            for component in rule.components:
                if component.copies < 1 or self.size % component.copies:
                    faults.append(f"{component.copies} copies of {component.name!r} among {self.size} ranks")
        if faults:
            raise ValueError(f"this is no layout: {'; '.join(faults)}")

    @staticmethod
    def vllm(config: Any, rank: int = 0, size: int = 1) -> Layout:
        """vLLM's names of a transformers model with this configuration, for rank `rank` of `size`.

        For Llama, Qwen2 and Qwen3. Raises `Unsupported` for other models, ValueError for heads that `size` ranks cannot
        share.
        """
        if config.model_type not in ("llama", "qwen2", "qwen3"):
            raise Unsupported(f"the layout of {config.model_type} in vLLM", "write the rules of a Layout for it")
        heads = config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        if size < 1 or heads % size or (keys % size and size % keys):
            raise ValueError(f"{size} tensor-parallel ranks cannot share {heads} heads and {keys} heads of keys evenly")
        copies = max(size // keys, 1)
        rules = []
        for kind in ("weight", "bias"):
            attention, mlp = f"model.layers.*.self_attn.{{}}_proj.{kind}", f"model.layers.*.mlp.{{}}_proj.{kind}"
            query = Component(attention.format("q"), heads * width)
            others = [Component(attention.format(name), keys * width, copies) for name in "kv"]
            rules.append(NameRule(attention.format("qkv"), (query, *others), sliced=True))
            halves = [Component(mlp.format(name), config.intermediate_size) for name in ("gate", "up")]
            rules.append(NameRule(mlp.format("gate_up"), tuple(halves), sliced=True))
        rows = ("model.layers.*.self_attn.o_proj.weight", "model.layers.*.mlp.down_proj.weight")
        rules += [NameRule(name, (Component(name),), dim=1, sliced=True) for name in rows]
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        words = [Component(name, config.vocab_size) for name in (embedding, head)]
        rules += [NameRule(each.name, (each,), sliced=True, padded=True) for each in words]
        tied = ((head, embedding),) if config.tie_word_embeddings else ()
        return Layout(tuple(rules), tied, rank, size)

    def targets(self, wanted: Mapping[str, PlacedTensor], there: Mapping[str, Shape]) -> list[BoxTarget]:
        """What to read of the tensors `there`, of global shapes, to fill the wanted ones.

        Raises `Mismatch` with all wanted tensors that cannot be made of them.
        """
        shapes = {name: tuple(each.shape) for name, each in wanted.items()}
        resolver = Resolver(self.rules, self.tied, self.rank, self.size, shapes, there)
        found = [
            target
            for name, each in wanted.items()
            for region in resolver.regions(name)
            for target in _targets(name, each.blocks, region)
        ]
        _raise(resolver.faults)
        return found

    def check(self, wanted: Mapping[str, Shape], there: Mapping[str, Shape]) -> None:
        """Check that the wanted tensors, of all tensor-parallel ranks, take all elements of the tensors `there`.

        Raises `Mismatch` with every wanted tensor that cannot be made, and every box that nothing takes.
        """
        taken: defaultdict[str, dict[Box, None]] = defaultdict(dict)
        faults: list[str] = []
        for rank in range(self.size):
            resolver = Resolver(self.rules, self.tied, rank, self.size, wanted, there)
            for name in wanted:
                for region in resolver.regions(name):
                    taken[region.name][region.source] = None
            faults += resolver.faults
        partners = both_ways(self.tied)
        for name, shape in there.items():
            if name not in taken and partners.get(name) in taken:
                continue
            _, left = cover(whole(shape), list(taken[name]))
            if left or name not in taken:
                faults.append(f"nothing takes {', '.join(map(spelt, left)) or 'any'} of {name!r}")
        _raise(faults)


def _targets(into: str, blocks: Blocks, region: NameRegion) -> Iterator[BoxTarget]:
    for box, local in blocks:
        part = common(box, region.wanted) if count_of(box) else None
        if part is not None:
            yield BoxTarget(into, region.name, moved(part, region.wanted, region.source), moved(part, box, local))


def _raise(faults: list[str]) -> None:
    if faults:
        raise Mismatch(f"the layout does not fit: {listed(dict.fromkeys(faults))}")
