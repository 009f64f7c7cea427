"""`Hooks`: the functions to call around each op of one communicator, and at its abort."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from holdfast.comms.errors import again, describe
from holdfast.comms.plan import OpDescription
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import AbortEvent, OpEvent
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


class Hooks:
    """The hooks of one communicator. From any thread."""

    def __init__(self, communicator: str, epoch: int, rank: int) -> None:
        self._identity = communicator, epoch, rank
        self._registry = registry()
        self._before: tuple[OpHook, ...] = ()
        self._after: tuple[OpHook, ...] = ()
        self._abort: tuple[AbortHook, ...] = ()
        self._ended: AbortEvent | None = None
        self._lock = threading.RLock()
        self.observed = False
        """Whether any hook, a plugin's too, watches ops: fast paths then decline them."""
        self._registry.follow(self)
        self.plugins_changed()

    def before_op(self, hook: OpHook) -> HookHandle:
        """Call `hook` with each op that is issued from now on, before any byte of it moves."""
        return self._add("_before", hook)

    def after_op(self, hook: OpHook) -> HookHandle:
        """Call `hook` with each op that has ended, its duration, and its error if it failed."""
        return self._add("_after", hook)

    def on_abort(self, hook: AbortHook) -> HookHandle:
        """Call `hook` once the communicator has ended; at once if it has already.

        That is by `abort`, by a failed op, with the communicator that this one was split from, or by `close` with ops
        that had not ended. It runs in the thread that ended the communicator, after blocked ops were released, and may
        abort and close communicators. What it raises is logged.
        """
        with self._lock:
            handle, ended = self._add("_abort", hook), self._ended
        if ended is not None:
            call_back([hook], ended)
        return handle

    def _add(self, kind: str, hook: Callable[..., object]) -> HookHandle:
        def remove() -> None:
            with self._lock:
                hooks = list(getattr(self, kind))
                position = next(i for i, entry in enumerate(hooks) if entry is own)
                setattr(self, kind, tuple(hooks[:position] + hooks[position + 1 :]))
            self.plugins_changed()

        def own(event: OpEvent | AbortEvent) -> None:  # one function a call: the same hook may be added twice
            hook(event)

        if not callable(hook):
            raise TypeError(f"a hook must be callable, not {hook!r}")
        with self._lock:
            setattr(self, kind, (*getattr(self, kind), own))
        self.plugins_changed()
        return HookHandle(remove)

    def move_to(self, communicator: str, epoch: int, rank: int) -> None:
        """Go on as the hooks of a communicator that has been reconfigured."""
        self._identity = communicator, epoch, rank
        self._ended = None

    def plugins_changed(self) -> None:
        """Set `observed` anew."""
        self.observed = self._registry.observed or bool(self._before or self._after)

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
            self._registry.before_op(event)
            for hook in self._before:
                hook(event)
        except BaseException as error:
            self.end(replace(event, error=error))
            raise
        return event

    def end(self, event: OpEvent) -> None:
        """Run all hooks after an op, and raise the first error of one; a failed op keeps its own."""
        raised: list[BaseException] = []
        for hook in (self._registry.after_op, *self._after):
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
            hooks = self._abort
        call_back([self._registry.on_abort, *hooks], event)
