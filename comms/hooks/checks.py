"""Hooks that are often wanted: a check of numbers, a comparison between ranks, a log of ops."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from holdfast.comms.errors import CorruptData, NonFinite
from holdfast.comms.hooks.hooks import HookHandle
from holdfast.comms.plugins.spec import AbortEvent, OpEvent
from holdfast.comms.tensors.memory import is_sparse

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

log = logging.getLogger("holdfast.comms")


def check_finite(comm: Communicator) -> HookHandle:
    """Make each op raise `NonFinite` if a tensor that it read or wrote on this rank holds NaN or infinity.

    The op is done before its inputs are complained about, so that no rank waits for one that stopped: each rank that
    has got such numbers raises, and the one that has contributed them says so.
    """
    contributed: dict[int, NonFinite] = {}

    def before(event: OpEvent) -> None:
        if (found := _non_finite(event, "input", event.inputs)) is not None:
            contributed[event.seq] = found

    def after(event: OpEvent) -> None:
        found = contributed.pop(event.seq, None)
        if event.error is None and found is None:
            found = _non_finite(event, "output", event.outputs)
        if event.error is None and found is not None:
            raise found

    handles = contextlib.ExitStack()
    for handle in (comm.hooks.before_op(before), comm.hooks.after_op(after)):
        handles.callback(handle.remove)
    return HookHandle(handles.close)


def _non_finite(event: OpEvent, kind: str, tensors: tuple[torch.Tensor, ...]) -> NonFinite | None:
    for position, tensor in enumerate(map(_stored, tensors)):
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
            continue
        wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
        nans = int(wide.isnan().sum())
        infinite = int((~wide.isfinite()).sum()) - nans  # NaN is not finite either
        if nans or infinite:
            name = f"{kind}s[{position}]" if len(tensors) > 1 else kind
            return NonFinite(event.op, event.seq, event.rank, name, nans, infinite)
    return None


ALIKE = frozenset(["all_reduce", "broadcast", "all_gather", "all_gather_single"])
"""The ops after which every rank must hold the same bytes."""


def compare_checksums(comm: Communicator, timeout: float | None = None) -> HookHandle:
    """Compare the results of ops that must be equal on all ranks; `CorruptData` names the ranks that differ.

    Collective: every rank calls it, and removes the handle, after the same op. The ranks exchange checksums over a
    split of the communicator, one small all-gather an op.
    """
    own = comm.split(range(comm.size), timeout=timeout)

    def compare(event: OpEvent) -> None:
        if event.error is not None or event.op not in ALIKE:
            return
        mine = 0
        for tensor in event.outputs:
            if is_sparse(tensor):
                mine = zlib.crc32(_bytes(tensor.coalesce().indices()), mine)
            mine = zlib.crc32(_bytes(_stored(tensor)), mine)
        sums = torch.empty(own.size, dtype=torch.int64, device=own.device)
        own.all_gather_single(sums, torch.tensor([mine], device=own.device))
        found = sums.tolist()
        usual = max(set(found), key=lambda value: (found.count(value), -found.index(value)))
        odd = [rank for rank, value in enumerate(found) if value != usual]
        if odd:
            raise CorruptData(
                f"{event.op} (op {event.seq}) of {event.communicator!r} has given other bytes on ranks {odd} than on "
                f"rank {found.index(usual)}; look for memory that is written during the op, or for a broken link"
            )

    hook = comm.hooks.after_op(compare)

    def remove() -> None:
        hook.remove()
        own.close()

    return HookHandle(remove)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a sparse tensor stores; any other tensor itself."""
    return tensor.detach().coalesce().values() if is_sparse(tensor) else tensor


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


class OpLog:
    """The last ops of one communicator on this rank, and those that have begun and not ended.

    At the abort, or at `close`, it logs a warning that names each leaked op: issued, and never ended.
    """

    def __init__(self, comm: Communicator, capacity: int = 1000) -> None:
        self.entries: deque[OpEvent] = deque(maxlen=capacity)
        """The ops that have ended, oldest first, without their tensors."""
        self._open: dict[int, OpEvent] = {}
        self._leaked: tuple[OpEvent, ...] = ()
        self._handles = (
            comm.hooks.before_op(self._begun),
            comm.hooks.after_op(self._ended),
            comm.hooks.on_abort(self._aborted),
        )

    @property
    def running(self) -> tuple[OpEvent, ...]:
        """The ops that have begun and not ended."""
        return tuple(self._open.values())

    @property
    def leaked(self) -> tuple[OpEvent, ...]:
        """The ops that had not ended when the communicator did."""
        return self._leaked

    def remove(self) -> None:
        """Log no further ops."""
        for handle in self._handles:
            handle.remove()

    def _begun(self, event: OpEvent) -> None:
        self._open[event.seq] = replace(event, inputs=(), outputs=())

    def _ended(self, event: OpEvent) -> None:
        self._open.pop(event.seq, None)
        self.entries.append(replace(event, inputs=(), outputs=()))

    def _aborted(self, event: AbortEvent) -> None:
        self._leaked = self.running
        if self._leaked:
            ops = ", ".join(f"{op.op} (op {op.seq}, {op.nbytes} bytes)" for op in self._leaked)
            log.warning("%r ended on rank %d before its ops did: %s", event.communicator, event.rank, ops)
