"""Hooks on the ops of one communicator (`comm.hooks`), and three that are often wanted.

    handle = comm.hooks.before_op(lambda event: print(event.op, event.inputs))
    handle.remove()

They are the hooks of plugins (`before_op`, `after_op`, `on_abort`) for one communicator, and get the same events:
`OpEvent`, with the op's tensors, and `AbortEvent`. A plugin's hooks see every communicator of the process.

`before_op` runs in the thread that issues the op, `after_op` where the op ran: for an asynchronous op in the
communicator's own thread. `after_op` follows each `before_op` once. A hook cannot call ops of the communicator it
watches; a `split` of it can.

An op whose hook raises fails with that error, and the communicator lives: if `before_op` raised, no byte has moved, and
the rank may issue the op again, for which the other ranks wait; if `after_op` raised, the op is complete.

While there is no hook, ops cost what they cost without this module.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from holdfast.comms.errors import CorruptData, NonFinite, again, describe
from holdfast.comms.ops import OpDescription
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import AbortEvent, OpEvent
from holdfast.comms.tensors.packing import is_sparse, packed
from holdfast.comms.work import call_back

log = logging.getLogger("holdfast.comms")

OpHook = Callable[[OpEvent], None]
AbortHook = Callable[[AbortEvent], object]


class HookHandle:
    """Removes what was added: call `remove`, or use it in a `with` statement."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """Remove the hook. Idempotent; an op that has begun may still call it."""
        remove, self._remove = self._remove, lambda: None
        remove()

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class AddedHooks:
    """What users have added to a communicator's hooks, by kind."""

    __slots__ = ("__weakref__", "abort", "after", "before")

    def __init__(self) -> None:
        self.before: tuple[OpHook, ...] = ()
        self.after: tuple[OpHook, ...] = ()
        self.abort: tuple[AbortHook, ...] = ()


class Hooks:
    """The hooks of one communicator. From any thread.

    The communicator, and each op that is queued, own what users have `added`. This only looks at it: it lives until a
    dropped communicator is closed, and would keep one to which a user's hook refers from being dropped.
    """

    def __init__(self, communicator: str, epoch: int, rank: int, added: AddedHooks) -> None:
        self._identity = communicator, epoch, rank
        self._registry = registry()
        self._plugins = self._registry.manager.hook
        self._added = weakref.ref(added)
        self._ended: AbortEvent | None = None
        self._lock = threading.RLock()
        self.observed = False
        """Whether any hook, a plugin's too, watches ops: fast paths then decline them."""
        self._registry.follow(self)
        self.plugins_changed()

    @property
    def added(self) -> AddedHooks:
        """What users have added. Nothing once the communicator is gone, and all its ops are complete."""
        return self._added() or AddedHooks()

    def before_op(self, hook: OpHook) -> HookHandle:
        """Call `hook` with each op that is issued from now on, before any byte of it moves."""
        return self._add("before", hook)

    def after_op(self, hook: OpHook) -> HookHandle:
        """Call `hook` with each op that has ended, its duration, and its error if it failed."""
        return self._add("after", hook)

    def on_abort(self, hook: AbortHook) -> HookHandle:
        """Call `hook` once the communicator has ended; at once if it has already.

        That is by `abort`, by a failed op, with the communicator that this one was split from, or by `close` with ops
        that had not ended. It runs in the thread that ended the communicator, after blocked ops were released, and may
        abort and close communicators. What it raises is logged.
        """
        with self._lock:
            handle, ended = self._add("abort", hook), self._ended
        if ended is not None:
            call_back([hook], ended)
        return handle

    def _add(self, kind: str, hook: Callable[..., object]) -> HookHandle:
        def remove() -> None:
            with self._lock:
                added = self.added
                setattr(added, kind, tuple(entry for entry in getattr(added, kind) if entry is not own))
            self.plugins_changed()

        def own(event: OpEvent | AbortEvent) -> None:  # one function a call: the same hook may be added twice
            hook(event)

        if not callable(hook):
            raise TypeError(f"a hook must be callable, not {hook!r}")
        with self._lock:
            added = self.added
            setattr(added, kind, (*getattr(added, kind), own))
        self.plugins_changed()
        return HookHandle(remove)

    def move_to(self, communicator: str, epoch: int, rank: int) -> None:
        """Go on as the hooks of a communicator that has been reconfigured."""
        self._identity = communicator, epoch, rank
        self._ended = None

    def plugins_changed(self) -> None:
        """Set `observed` anew."""
        added = self.added
        self.observed = self._registry.observed or bool(added.before or added.after)

    # -- called by the executor

    def begin(self, description: OpDescription, seq: int, async_op: bool) -> OpEvent:
        """Run the hooks before an op. If one raises, the hooks after it learn of the error."""
        event = OpEvent(
            *self._identity,
            seq,
            description.name,
            description.nbytes,
            inputs=description.inputs,
            outputs=description.outputs,
            root=description.peer,
            reduction=description.reduction,
            async_op=async_op,
        )
        try:
            self._plugins.before_op(event=event)
            for hook in self.added.before:
                hook(event)
        except BaseException as error:
            self.end(replace(event, error=error))
            raise
        return event

    def end(self, event: OpEvent) -> None:
        """Run all hooks after an op, and raise the first error of one; a failed op keeps its own."""
        raised: list[BaseException] = []
        for hook in (lambda event: self._plugins.after_op(event=event), *self.added.after):
            try:
                hook(event)
            except BaseException as error:
                raised.append(error)
        if raised and event.error is None:
            raise again(raised[0]) from raised[0]
        for late in raised:
            log.error("a hook after %s (op %d), which had failed, raised %s", event.op, event.seq, describe(late))

    def aborted(self, error: BaseException) -> None:
        """Run the hooks of the abort, once."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = event = AbortEvent(*self._identity, error)
            hooks = self.added.abort
        call_back([lambda event: self._plugins.on_abort(event=event), *hooks], event)


if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator


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
    return packed(tensor.detach().cpu()).view(-1).view(torch.uint8).numpy().tobytes()


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
