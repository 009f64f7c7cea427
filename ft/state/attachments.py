"""Checks of the state that a user attaches to a session, before it is replicated."""

from __future__ import annotations

import os

from holdfast.comms.errors import HoldfastError
from holdfast.ft.state.checkpoints import Checkpoints
from holdfast.ft.state.codec import encode_state
from holdfast.ft.state.replicator import StateReplicator
from holdfast.ft.state.sharded import Build, Shape, Sharded
from holdfast.ft.state.transfer import Stateful


class Attachments:
    """Passes what a session attaches on to its `StateReplicator`, until `closed`; see the methods of `Session`."""

    def __init__(self, replicator: StateReplicator, wanted: int | None) -> None:
        """`wanted` is the number of members that the job wants, if that is known."""
        self._replicator, self._wanted = replicator, wanted
        self.closed = False

    def attach(self, name: str, thing: Stateful) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise TypeError(f"{name!r} cannot be attached: {type(thing).__name__} has no {method}()")
        if name in self._replicator.attached:
            raise ValueError(f"something is attached as {name!r} already")
        if self.closed:
            raise HoldfastError(f"{name!r} must be attached before steps()")
        encode_state({name: thing.state_dict()})
        self._replicator.attached[name] = thing

    def attach_sharded(self, build: Build, *, copies: int = 1, mesh: Shape | None = None) -> Sharded:
        if self.closed:
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

    def checkpoints(self, directory: str | os.PathLike[str], *, every: int, last: int | None) -> None:
        if self.closed:
            raise HoldfastError("checkpoints() must be called before steps()")
        self._replicator.checkpoints = Checkpoints(directory, every, last)
