"""Durable checkpoints of all attached state, by torch.distributed.checkpoint, for the loss of all copies of a part.

A checkpoint is a folder `step-<number of steps done>`, complete once it has its metadata. Any number of ranks can read
it. Tensors are named by their path in the state ("model.lm_head.weight"); `DESCRIPTION` holds everything else.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import UNDECODABLE, CorruptData, Mismatch, describe
from holdfast.comms.quantities import integer_in
from holdfast.ft.state.boxes import shape_of
from holdfast.ft.state.codec import decode_state
from holdfast.ft.state.leaves import Leaf, RankMesh, place

DESCRIPTION = "holdfast.description"
KEPT = 2
"""The number of newest complete checkpoints that are kept."""
PROBE_SECONDS = 3.0
"""How long a rank looks for the file that rank 0 has written."""
_PROBE, _PROBE_PAUSE = ".shared-", 0.01


class _Contents(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    leaves: tuple[Leaf, ...]
    description: bytes


_decoder = msgspec.msgpack.Decoder(_Contents)


@dataclass(frozen=True, slots=True)
class _FoundCheckpoint:
    """What one rank finds in its directory."""

    host: str
    path: str
    steps: list[int]
    sees: bool

    def __str__(self) -> str:
        steps = f"steps {', '.join(map(str, self.steps))}" if self.steps else "no checkpoint"
        return f"{self.host}:{self.path}: {steps}"


class Checkpoints:
    """A directory of checkpoints, one every `every` steps, that all ranks share.

    With `last` there is one after so many steps too, and none later. What it holds is agreed by the ranks in `agree`,
    at the beginning of each epoch, and looked up nowhere else: all ranks enter a collective save, or none.
    """

    def __init__(self, directory: str | os.PathLike[str], every: int, last: int | None = None) -> None:
        """Raises ValueError, TypeError for arguments that cannot work, OSError if the directory cannot be made."""
        self.every = integer_in(every, "every", 1)
        self._last = None if last is None else integer_in(last, "last", 1)
        self._directory = Path(directory)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(self._directory, os.W_OK):
            raise ValueError(f"no checkpoint can be written to {self._directory}")
        self._agreed: set[int] = set()
        """The complete checkpoints that all ranks see, by their numbers of steps done."""

    def agree(self, comm: Communicator, done: int) -> None:
        """Check that all ranks share the directory, and agree on what it holds; collective.

        Rank 0 puts a file there, which the others look for. Raises `Mismatch`, which names hosts and paths, on every
        rank if the ranks do not share it; in a job that has `done` steps, on those alone that do not see what most see.
        """
        with self._probe(comm.rank) as written:
            probe = comm.all_gather_object(written)[0]
            seen = self._sees(probe)
            found = [_FoundCheckpoint(*rank) for rank in comm.all_gather_object((*self._found(), seen))]
        blind = [rank for rank, there in enumerate(found) if not there.sees]
        if blind and (done == 0 or comm.rank in blind or 2 * len(blind) >= comm.size):
            each = "; ".join(f"rank {rank} ({there})" for rank, there in enumerate(found))
            raise Mismatch(
                f"the ranks do not share the folder of their checkpoints: rank{'s' * (len(blind) > 1)} "
                f"{', '.join(map(str, blind))} cannot see what rank 0 writes "
                f"there: {each}. Name a folder that all of them reach"
            )
        self._agreed = set.intersection(*(set(there.steps) for there in found if there.sees))

    def newest(self) -> int:
        """The number of steps done at the newest complete checkpoint that all ranks see; -1 if there is none."""
        return max(self._agreed, default=-1)

    def due(self, done: int) -> bool:
        """Whether a checkpoint must be written after `done` steps; the same on all ranks."""
        if done <= 0 or (self._last is not None and done > self._last):
            return False
        return (done % self.every == 0 or done == self._last) and done not in self._agreed

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
        self._agreed.add(done)
        if dist.get_rank() == 0:
            before = [number for number in self._complete() if number <= done]  # one of more steps is not this job's
            for old in sorted(before)[:-KEPT]:
                shutil.rmtree(self._path(old), ignore_errors=True)

    def load(self, done: int, mesh: RankMesh, devices: Any, rank: int, device: torch.device) -> dict[str, Any]:
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
        except UNDECODABLE as error:
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

    @contextmanager
    def _probe(self, rank: int) -> Iterator[str]:
        """The name of a new file that rank 0 has put into the directory, while inside; "" on the others."""
        if rank:
            yield ""
            return
        for left in self._directory.glob(f"{_PROBE}*"):  # by a rank 0 that was killed
            left.unlink(missing_ok=True)
        probe = self._directory / f"{_PROBE}{secrets.token_hex(8)}"
        probe.touch(0o600)
        try:
            yield probe.name
        finally:
            probe.unlink(missing_ok=True)

    def _sees(self, probe: str) -> bool:
        """Whether the file is there, within a while: a network's file system may show it late."""
        deadline = time.monotonic() + PROBE_SECONDS
        while not (self._directory / probe).exists():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PROBE_PAUSE)
        return True

    def _found(self) -> tuple[str, str, list[int]]:
        return socket.gethostname(), str(self._directory.absolute()), sorted(self._complete())

    def _path(self, done: int) -> Path:
        return self._directory / f"step-{done:09d}"


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress the warnings of torch's checkpoints about their own use of deprecated types."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
