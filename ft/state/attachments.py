"""The methods of a session that attach user state, which the job then keeps the same on all ranks."""

from __future__ import annotations

import os

from holdfast.comms.errors import HoldfastError
from holdfast.ft.state.checkpoints import Checkpoints
from holdfast.ft.state.codec import take_apart
from holdfast.ft.state.replicator import StateReplicator
from holdfast.ft.state.sharded import Build, Shape, Sharded
from holdfast.ft.state.transfer import Stateful


class Attachments:
    """The part of `holdfast.ft.Session` that attaches state before the first step; `keeper` replicates it."""

    def __init__(self, keeper: StateReplicator, wanted: int | None) -> None:
        """`wanted` is the number of members that the job wants, if that is known."""
        self._replicator, self._wanted = keeper, wanted
        self._used = False

    def attach(self, name: str, thing: Stateful) -> None:
        """Keep `thing` the same on all ranks: newcomers get its state from the ranks that have it.

        Raises TypeError at once if `thing` has no state_dict and load_state_dict, or its state cannot be sent.
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
        """Keep the dict that `build(mesh)` returns (model, optimizer ...), sharded over a DeviceMesh of all ranks.

        The mesh has one dimension, or those that `mesh(size)` returns, such as {"replicate": size // 2, "shard": 2}.
        Each epoch builds the dict anew and loads its state: `copies` neighbours of each rank keep a copy of its part in
        memory, refreshed with every commit. A part that is lost with all its copies comes from the newest of the
        `checkpoints`. It belongs to the transaction: change it (`optimizer.step()`) inside the attempt.

        Raises TypeError and ValueError for arguments that cannot work, HoldfastError if something sharded is attached.
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
        import torch.distributed.tensor  # noqa: F401  # here, so that a promoted spare does not pay for the import

        self._replicator.sharded = sharded
        return sharded

    def checkpoints(self, directory: str | os.PathLike[str], *, every: int) -> None:
        """Save all attached state with torch.distributed.checkpoint every `every` steps, to a `directory` of all ranks.

        A job that finds checkpoints there at its start continues from the newest. Raises ValueError, TypeError, OSError
        for arguments that cannot work.
        """
        if self._used:
            raise HoldfastError("checkpoints() must be called before steps()")
        self._replicator.checkpoints = Checkpoints(directory, every)
