"""State that is sharded over the ranks of a job and built anew for each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.comms.errors import HoldfastError
from holdfast.comms.quantities import integer
from holdfast.ft.state.leaves import Mesh, all_ranks
from holdfast.ft.state.transfer import Stateful

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Build = Callable[["DeviceMesh"], Mapping[str, Stateful]]
"""Returns model, optimizer and the like over a mesh of all ranks. Called in each epoch; must build the same things."""
Shape = Callable[[int], Mapping[str, int]]
"""Returns the mesh's dimensions by name for a number of ranks, such as {"replicate": 2, "shard": 4} for 8.
Called for each number of ranks that is possible; must return the same names every time."""

MOST_COPIES = 64


class Sharded(Mapping[str, Any]):
    """The things that `build` returned in this epoch, by name. Made by `Session.attach_sharded`.

    They belong to the transaction: change them inside an attempt; if it fails, their state is restored. Look them up
    again in each epoch: things that were built for an earlier epoch cannot be used.
    """

    def __init__(self, build: Build, copies: int, shape: Shape | None) -> None:
        if not callable(build):
            raise TypeError(f"build must be a function of a DeviceMesh, not {type(build).__name__}")
        copies = integer(copies, "copies")
        if not 0 <= copies <= MOST_COPIES:
            raise ValueError(f"copies={copies} is out of range: 0 to {MOST_COPIES} neighbours keep a copy of each part")
        if shape is not None and not callable(shape):
            raise TypeError(f"mesh must be a function of the number of ranks, not {type(shape).__name__}")
        self.copies = copies
        self._build = build
        self._shape = shape
        self._names: tuple[str, ...] = ()
        self._things: dict[str, Stateful] = {}

    def __repr__(self) -> str:
        return f"<Sharded: {', '.join(self._things) or 'not built yet'}>"

    def __getitem__(self, name: str) -> Any:
        if not self._things:
            raise HoldfastError(f"{name!r} is built when the next attempt begins: its state is that of an epoch")
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)

    @property
    def things(self) -> dict[str, Stateful]:
        """The things built in this epoch, by name, to save and load their state."""
        return self._things

    def drop(self) -> None:
        """Drop the things that were built for an epoch that is over."""
        self._things = {}

    @property
    def may_have_replicas(self) -> bool:
        """Whether ranks may have equal parts; with a `mesh` function, known for sure only once built."""
        return self._shape is not None

    def mesh(self, size: int) -> Mesh:
        """The mesh of `size` ranks. Raises ValueError, TypeError if the `mesh` function returns none of that size."""
        if self._shape is None:
            return all_ranks(size)
        asked = self._shape(size)
        if not isinstance(asked, Mapping) or not all(isinstance(name, str) and name for name in asked):
            raise TypeError(f"mesh({size}) must give a dict of sizes by name, not {asked!r}")
        sizes = tuple(integer(each, f"mesh({size})[{name!r}]") for name, each in asked.items())
        if any(each < 1 for each in sizes):
            raise ValueError(f"mesh({size}) gave {dict(asked)}: each size must be a whole number, 1 or more")
        found = Mesh(tuple(asked), sizes)
        if not sizes or found.size != size:
            raise ValueError(f"mesh({size}) gave {dict(asked)}, which is a mesh of {found.size} ranks")
        if self._names not in ((), found.names):
            raise ValueError(f"mesh({size}) has dimensions {found.names}; for other sizes they were {self._names}")
        self._names = found.names
        return found

    def build(self, mesh: DeviceMesh) -> None:
        """Build for a new epoch. Raises TypeError if `build` returns no dict of things with a state."""
        made = self._build(mesh)
        if not isinstance(made, Mapping) or not made:
            raise TypeError(
                f"build() must return a dict of what it built, such as {{'model': model, 'optimizer': optimizer}}, "
                f"not {type(made).__name__}"
            )
        for name, thing in made.items():
            check_stateful(thing, f"build() returned {name!r}, a {type(thing).__name__}, which has")
        self._things = dict(made)


def check_stateful(thing: object, whose: str) -> None:
    """Raise TypeError, which begins with `whose`, for a thing without a state that can be given and taken."""
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(thing, method, None)):
            raise TypeError(f"{whose} no {method}()")
