"""What a job keeps for its user: attached before the first step, the same on all ranks from then on, whoever dies."""

from __future__ import annotations

import os

from holdfast.comms.errors import HoldfastError
from holdfast.ft.state.checkpoints import Checkpoints
from holdfast.ft.state.codec import take_apart
from holdfast.ft.state.replicator import StateReplicator
from holdfast.ft.state.sharded import Build, Shape, Sharded
from holdfast.ft.state.transfer import Stateful


class Attachments:
    """The part of a `holdfast.ft.Session` by which a user says what is to be kept; `keeper` does so."""

    def __init__(self, keeper: StateReplicator, wanted: int | None) -> None:
        """`wanted` is how many members the job wants, if that is known."""
        self._replicator, self._wanted = keeper, wanted
        self._used = False

    def attach(self, name: str, thing: Stateful) -> None:
        """Keep `thing` the same on all ranks: newcomers get its state from those that have it.

        Raises TypeError at once for what has no state_dict and load_state_dict, or whose state cannot travel.
        """
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise TypeError(f"{name!r} cannot be attached: {type(thing).__name__} has no {method}()")
        if name in self._replicator.attached:
            raise ValueError(f"something is attached as {name!r} already")
        if self._used:
            raise HoldfastError(f"{name!r} must be attached before steps()")
        take_apart({name: thing.state_dict()})
        self._replicator.attached[name] = thing

    def attach_sharded(self, build: Build, *, copies: int = 1, mesh: Shape | None = None) -> Sharded:
        """Keep what `build(mesh)` makes (a dict: model, optimizer ...), sharded over a DeviceMesh of all ranks: of one
        dimension, or as `mesh(size)` lays them out, such as {"replicate": size // 2, "shard": 2}.

        It is built in every epoch anew, and gets the state that it had: `copies` neighbours of each rank keep a copy of
        its part in memory, refreshed with every commit. A part that is lost with all copies comes from the newest of
        the `checkpoints`. It belongs to the transaction: change it (`optimizer.step()`) inside of the attempt.

        Raises TypeError and ValueError for what cannot work, HoldfastError if something sharded is attached already.
        """
        if self._used:
            raise HoldfastError("attach_sharded() must be called before steps()")
        if self._replicator.sharded is not None:
            raise HoldfastError("something sharded is attached already; let one build() return everything")
        sharded, size = Sharded(build, copies, mesh), self._wanted
        if size and copies >= max(size, 2):
            raise ValueError(f"copies={copies}: in a job of {size} ranks each has {size - 1} neighbours")
        if size:
            sharded.mesh(size)
        import torch.distributed.tensor  # noqa: F401  # here, so that a spare need not when it is promoted

        self._replicator.sharded = sharded
        return sharded

    def checkpoints(self, directory: str | os.PathLike[str], *, every: int) -> None:
        """Save all that is attached by torch.distributed.checkpoint after every so many steps, in a directory that all
        ranks see. A job that starts and finds checkpoints there goes on from the newest.

        Raises ValueError, TypeError, OSError for what cannot work.
        """
        if self._used:
            raise HoldfastError("checkpoints() must be called before steps()")
        self._replicator.checkpoints = Checkpoints(directory, every)
