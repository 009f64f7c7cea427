"""Durable checkpoints of all attached state, by torch.distributed.checkpoint, for the loss of all copies of a part.

A checkpoint is a folder `step-<number of steps done>`, complete once it has its metadata. Any number of ranks can read
it. Tensors are named by their path in the state ("model.lm_head.weight"); `DESCRIPTION` holds everything else.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.comms.errors import CorruptData, describe
from holdfast.comms.quantities import integer_in
from holdfast.ft.state.boxes import shape_of
from holdfast.ft.state.codec import decode_state
from holdfast.ft.state.leaves import Leaf, place
from holdfast.ft.state.mesh import Mesh

DESCRIPTION = "holdfast.description"
KEPT = 2
"""The number of newest complete checkpoints that are kept."""


class _Contents(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    leaves: tuple[Leaf, ...]
    description: bytes


_decoder = msgspec.msgpack.Decoder(_Contents)


class Checkpoints:
    """A directory of checkpoints, one every `every` steps. All ranks must see the same directory.

    With `last` there is one after so many steps too, and none later.
    """

    def __init__(self, directory: str | os.PathLike[str], every: int, last: int | None = None) -> None:
        """Raises ValueError, TypeError for arguments that cannot work, OSError if the directory cannot be made."""
        self.every = integer_in(every, "every", 1)
        self._last = None if last is None else integer_in(last, "last", 1)
        self._directory = Path(directory)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(self._directory, os.W_OK):
            raise ValueError(f"no checkpoint can be written to {self._directory}")

    def newest(self) -> int:
        """The number of steps done at the newest complete checkpoint; -1 if there is none."""
        return max(self._complete(), default=-1)

    def due(self, done: int) -> bool:
        """Whether a checkpoint must be written after `done` steps."""
        if done <= 0 or (self._last is not None and done > self._last):
            return False
        wanted = done % self.every == 0 or done == self._last
        return wanted and not (self._path(done) / ".metadata").exists()

    def save(self, done: int, description: bytes, leaves: Sequence[Leaf], tensors: Sequence[torch.Tensor]) -> None:
        """Write the checkpoint after `done` steps; collective over the default group.

        `tensors` are the tensors of the state, DTensors where it is sharded."""
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        contents = msgspec.msgpack.encode(_Contents(tuple(leaves), description))
        state: dict[str, Any] = {leaf.path: tensor for leaf, tensor in zip(leaves, tensors, strict=True)}
        state[DESCRIPTION] = torch.frombuffer(bytearray(contents), dtype=torch.uint8)
        with _without_warnings():
            dcp.save(state, checkpoint_id=self._path(done))
        if dist.get_rank() == 0:
            for old in sorted(self._complete())[:-KEPT]:
                shutil.rmtree(self._path(old), ignore_errors=True)

    def load(self, done: int, mesh: Mesh, devices: Any, rank: int, device: torch.device) -> dict[str, Any]:
        """The state after `done` steps, sharded over `devices`; collective over the default group.

        `devices` is the DeviceMesh that `mesh` describes. Raises `CorruptData` for a checkpoint that is damaged or
        that holdfast did not write, `Mismatch` for a checkpoint of a mesh with other dimensions.
        """
        import torch.distributed.checkpoint as dcp

        path = self._path(done)
        try:
            known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata.get(DESCRIPTION)
        except Exception as error:  # whatever pickle makes of the bytes
            said = f"the checkpoint {path} cannot be read ({describe(error)}): remove it to go on from an older one"
            raise CorruptData(said) from error
        if known is None or not hasattr(known, "size"):
            raise CorruptData(f"{path} is no checkpoint of a holdfast session: it has no {DESCRIPTION!r}")
        raw = torch.empty(known.size, dtype=torch.uint8, device="cpu")
        with _without_warnings():
            dcp.load({DESCRIPTION: raw}, checkpoint_id=path)
        try:
            contents = _decoder.decode(raw.numpy().tobytes())
        except msgspec.DecodeError as error:
            raise CorruptData(f"{path}: {DESCRIPTION!r} is not a description: {error}") from error
        tensors = [
            place(
                leaf, torch.zeros(shape_of(leaf.box(mesh, rank)), dtype=leaf.torch_dtype, device=device), mesh, devices
            )
            for leaf in contents.leaves
        ]
        with _without_warnings():
            dcp.load(
                {leaf.path: tensor for leaf, tensor in zip(contents.leaves, tensors, strict=True)}, checkpoint_id=path
            )
        state: dict[str, Any] = decode_state(contents.description, tensors)
        return state

    def _complete(self) -> list[int]:
        found = []
        for path in self._directory.glob("step-*/.metadata"):
            number = path.parent.name.removeprefix("step-")
            if number.isdecimal():
                found.append(int(number))
        return found

    def _path(self, done: int) -> Path:
        return self._directory / f"step-{done:09d}"


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress the warnings of torch's checkpoints about their own use of deprecated types."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
