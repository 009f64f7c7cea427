"""`Layout`: how the names and shapes of a reader's state dict are made of those of the publisher's.

One layout serves both directions: of a fused tensor and its components, whichever the version has is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.ft.state.boxes import Box, common, count_of, cover, moved, whole
from holdfast.store.reshard.name_patterns import wildcards
from holdfast.store.reshard.name_rules import Component, NameRule
from holdfast.store.reshard.placements import Blocks
from holdfast.store.reshard.plan import BoxTarget, listed, spelt
from holdfast.store.reshard.resolver import NameRegion, Resolver, Shape, both_ways


class Wanted(Protocol):
    """A tensor to fill: its global shape, and the blocks of it that lie in a local tensor."""

    @property
    def shape(self) -> Shape: ...

    @property
    def blocks(self) -> Blocks: ...


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

    def targets(self, wanted: Mapping[str, Wanted], there: Mapping[str, Shape]) -> list[BoxTarget]:
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
