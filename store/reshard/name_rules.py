"""Rules for the names of tensors: which are other names, and which are joined of several."""

from __future__ import annotations

from dataclasses import dataclass


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
