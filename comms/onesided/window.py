"""`Window`: one-sided access between the ranks of a communicator. Each exposes a tensor; all may read and write it.

Memory ordering: a rank's puts, atomics and signals to one target take effect in the order in which it issued them, and
`wait_signal` returns after everything that the signalling rank did to this one before. Between ranks that do not
signal each other there is no order. `fetch_add` and `compare_swap` of all ranks on one element are atomic with regard
to each other, but not with regard to put or to the owner's own use of its tensor.

Whether a rank that computes, sleeps or is stopped delays other ranks' ops on its memory depends on the transport:
`Capabilities.passive_target` says which it is, and the docstring of the transport's window says it for each op.

With `async_op=True` a call returns a `Work` at once. Calls to one rank run in the order of issue, synchronous ones
among them; waits for its signals have an order of their own, so that a wait does not delay what a peer needs to
signal.

A window exposes the memory that its tensor has when the window is made. That memory is kept until the window is closed,
and torch refuses to resize it, also afterwards. If the tensor gets other memory nevertheless (`t.data = ...`, `set_`),
the owner's next call closes the window and raises `RegionGone`; until then the other ranks access the old memory.

Where ranks map each other's memory, the whole storage of the tensor moves into shared memory, and its views with it.
What a rank writes late, after the last window over a part of that storage is closed, reaches none of them.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar, overload

import torch

from holdfast.comms import _native
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, RegionGone, Unsupported
from holdfast.comms.quantities import integer, seconds
from holdfast.comms.system import forks
from holdfast.comms.system.signal_safety import run_shielded
from holdfast.comms.system.waiting import Wait
from holdfast.comms.tensors.memory import ExposedMemory, moved_error
from holdfast.comms.tensors.overlap import check_outputs
from holdfast.comms.tensors.packing import DTYPE_CODE, DTYPES, packed, plain_tensor, unpack
from holdfast.comms.transport.base import Transport, WindowMemory, closed_here, gather_bytes
from holdfast.comms.work import DONE, REPORT_SECONDS, Lane, UntoldFailure, Work

Tensor = torch.Tensor
T = TypeVar("T")

ATOMIC_DTYPES = (torch.int32, torch.int64)
_RANGES = {dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in ATOMIC_DTYPES}
_CLOSE_SECONDS = 10.0
_MOST_DIMENSIONS = 64
"""The most dimensions of a torch tensor."""
_SHAPE = struct.Struct(f"={2 + _MOST_DIMENSIONS}q")
"""A dtype's code, the number of dimensions, and their sizes."""


@dataclass(frozen=True, slots=True)
class WindowInfo:
    """What a window exposes: `sizes` (elements) and `shapes` of each rank's tensor, which have one `dtype`.

    `access` says how other ranks' memory is reached: "mapped" (`Window.map` works), or "messages" that the target
    answers. `atomics` says whether `fetch_add` and `compare_swap` work on this window.
    """

    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    access: Literal["mapped", "messages"]
    atomics: bool


class WindowWork(Work, Generic[T]):
    """The handle of an asynchronous call of a window. An atomic has a result: the old value."""

    __slots__ = ("__weakref__", "_value")
    _value: T

    def result(self, timeout: float | None = None) -> T:
        """As `wait`; returns what the call returns."""
        self.wait(timeout)
        return self._value


Expose = Callable[[Tensor, float | None], tuple[WindowMemory, WindowInfo]]
"""Expose a tensor to all ranks, and access theirs; collective. Returns a backend's memory, and what is known of it."""


class Window:
    """A window, made by `Communicator.window`. Offsets and indices count elements. A context manager.

    A call is complete when it returns, or its work is done, unless the backend says that it needs a `flush`. Raises
    ValueError for an offset out of range, before any byte moves; `RegionGone` if the target rank closed its window or
    died, or if no tensor is registered.
    """

    def __init__(
        self, expose: Expose, meet: Callable[[float | None], object], rank: int, timeout: float, owner: object
    ) -> None:
        """`owner` is kept alive with the window. `meet` returns once all ranks have called it."""
        self.rank = rank
        self._expose, self._meet, self._owner, self._timeout = expose, meet, owner, timeout
        self._ended = False
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._issuing = threading.Lock()
        self._settled_by = 0.0
        """The latest deadline of an asynchronous call."""
        self._untold = UntoldFailure()
        self._info: WindowInfo | None = None
        self._exposed: ExposedMemory | None = None
        self._calls = _refused_calls(_no_tensor)
        self._closing = self._released = False
        forks.refuse_in_children(self, f"a window of rank {rank}", ("rank", "dtype"))

    # -- the tensor

    def register(self, tensor: Tensor, timeout: float | None = None) -> None:
        """Expose `tensor` to all ranks, and access theirs; collective. For a window without a tensor.

        Sizes and shapes may differ from rank to rank, dtypes may not.
        """
        if self._ended:
            raise closed_here()
        if self._info is not None:
            raise ValueError("the window has a tensor already; call deregister() first, or make another window")
        memory, info = self._expose(tensor, timeout)
        self._memory, self.dtype = memory, info.dtype
        self._itemsize = info.dtype.itemsize
        self._elements = list(info.sizes)
        self._exposed = ExposedMemory(tensor)
        self._bounds = _native.WindowBounds(torch.empty(0, dtype=info.dtype, device="cpu"), tuple(memory.sizes))
        self._closing, self._released = False, False
        self._info = info
        self._calls = _native.ActiveCalls(closed_here, tensor, partial(_close_moved, memory, self.rank))

    def deregister(self, timeout: float | None = None) -> None:
        """Wait until this rank's calls have taken effect, and for all ranks, then stop exposing the tensor; collective.

        Another tensor may be registered afterwards. Does nothing for a window without a tensor.
        """
        if self._info is None:
            return
        deadline = self._deadline(timeout)
        for key in list(self._lanes):
            self._wait_turn(key, "deregister", deadline)
        for rank in range(len(self._elements)):  # what was put arrives before the tensors are withdrawn
            with contextlib.suppress(RegionGone):  # a rank that has left takes nothing more
                self._memory.flush(rank, deadline)
        self._meet(max(deadline - time.monotonic(), 0.0))
        self._end_exposure()
        self._info = None
        self._calls = _refused_calls(_no_tensor)

    @property
    def info(self) -> WindowInfo:
        """What the window exposes. Raises `RegionGone` if no tensor is registered."""
        if self._info is None:
            raise _no_tensor()
        return self._info

    @property
    def memory(self) -> WindowMemory:
        """The backend's part of the window. Raises `RegionGone` if no tensor is registered."""
        if self._info is None:
            raise _no_tensor()
        return self._memory

    @property
    def closed(self) -> bool:
        """Whether this rank has closed the window."""
        return self._ended or (self._info is not None and self._calls.over)

    def map(self, rank: int) -> Tensor:
        """The tensor of `rank` itself, for loads and stores; no call is needed to reach it.

        The mapping outlives the window and the peer: after their end it holds the last values that were written, and
        what is stored into it reaches no process. To learn of the end, call the window. Loads and stores have no order
        with calls but that of `signal` and `wait_signal`. Raises `Unsupported` for another rank unless `info.access` is
        "mapped".
        """
        with self._calls:
            rank = self._check_rank(rank)
            if self.info.access != "mapped":
                if rank == self.rank and self._exposed is not None:
                    return self._exposed.held
                raise Unsupported(
                    f"map of a window that is reached by {self.info.access}",
                    "use get and put; backends that share memory map windows between processes of one host",
                )
            return self._memory.map(rank).view(self.dtype).view(self.info.shapes[rank])

    # -- calls

    def put(
        self, src: Tensor, rank: int, offset: int = 0, timeout: float | None = None, *, async_op: bool = False
    ) -> Work:
        """Copy `src` into the window of `rank`, from element `offset` on. `src` must not change until that is done."""
        with self._calls:
            at = self._bounds.byte_offset(src, rank, offset)
            if at < 0:
                src = plain_tensor(src, "src")
                rank = self._check_rank(rank)
                at, src = self._checked(src, rank, offset), packed(src)
            deadline = self._deadline(timeout)
            if async_op:
                return self._issue(("to", rank), "put", partial(self._memory.write, rank, at, src, deadline), deadline)
            if self._lanes:
                self._wait_turn(("to", rank), "put", deadline)
            self._memory.write(rank, at, src, deadline)
            return DONE

    def get(
        self, dst: Tensor, rank: int, offset: int = 0, timeout: float | None = None, *, async_op: bool = False
    ) -> Work:
        """Fill `dst` from the window of `rank`, from element `offset` on."""
        with self._calls:
            at, flat = self._bounds.byte_offset(dst, rank, offset), dst
            if at < 0:
                dst = plain_tensor(dst, "dst")
                check_outputs([dst], ["dst"])
                rank = self._check_rank(rank)
                at, flat = self._checked(dst, rank, offset), packed(dst)
            deadline = self._deadline(timeout)
            if async_op:
                return self._issue(("to", rank), "get", partial(self._fetch, rank, at, flat, dst, deadline), deadline)
            if self._lanes:
                self._wait_turn(("to", rank), "get", deadline)
            self._memory.read(rank, at, flat, deadline)
            unpack(flat, dst)
            return DONE

    def _fetch(self, rank: int, at: int, flat: Tensor, dst: Tensor, deadline: float) -> None:
        self._memory.read(rank, at, flat, deadline)
        unpack(flat, dst)

    @overload
    def fetch_add(
        self, rank: int, index: int, value: int, timeout: float | None = None, *, async_op: Literal[False] = False
    ) -> int: ...
    @overload
    def fetch_add(
        self, rank: int, index: int, value: int, timeout: float | None = None, *, async_op: Literal[True]
    ) -> WindowWork[int]: ...
    def fetch_add(
        self, rank: int, index: int, value: int, timeout: float | None = None, *, async_op: bool = False
    ) -> int | WindowWork[int]:
        """Atomically add `value` to an element of the window of `rank`; return the old value, or its work."""
        with self._calls:
            rank, at, (value,) = self._element(rank, index, value)
            deadline = self._deadline(timeout)
            call = partial(self._memory.fetch_add, rank, at, self.dtype, value, deadline)
            return self._call(("to", rank), "fetch_add", call, deadline, async_op)

    @overload
    def compare_swap(
        self,
        rank: int,
        index: int,
        expected: int,
        desired: int,
        timeout: float | None = None,
        *,
        async_op: Literal[False] = False,
    ) -> int: ...
    @overload
    def compare_swap(
        self,
        rank: int,
        index: int,
        expected: int,
        desired: int,
        timeout: float | None = None,
        *,
        async_op: Literal[True],
    ) -> WindowWork[int]: ...
    def compare_swap(
        self,
        rank: int,
        index: int,
        expected: int,
        desired: int,
        timeout: float | None = None,
        *,
        async_op: bool = False,
    ) -> int | WindowWork[int]:
        """Atomically set an element of rank's window to `desired` if it is `expected`.

        Returns the old value, or its work.
        """
        with self._calls:
            rank, at, (expected, desired) = self._element(rank, index, expected, desired)
            deadline = self._deadline(timeout)
            call = partial(self._memory.compare_swap, rank, at, self.dtype, expected, desired, deadline)
            return self._call(("to", rank), "compare_swap", call, deadline, async_op)

    def signal(self, rank: int, timeout: float | None = None, *, async_op: bool = False) -> Work:
        """Send `rank` one signal: one of its `wait_signal` calls for this rank returns."""
        with self._calls:
            rank, deadline = self._check_rank(rank), self._deadline(timeout)
            if async_op:
                return self._issue(("to", rank), "signal", partial(self._memory.signal, rank, deadline), deadline)
            if self._lanes:
                self._wait_turn(("to", rank), "signal", deadline)
            self._memory.signal(rank, deadline)
            return DONE

    def wait_signal(self, rank: int, timeout: float | None = None, *, async_op: bool = False) -> Work:
        """Wait for one signal from `rank`, and consume it."""
        with self._calls:
            rank, deadline = self._check_rank(rank), self._deadline(timeout)
            if async_op:
                return self._issue(
                    ("from", rank), "wait_signal", partial(self._memory.wait_signal, rank, deadline), deadline
                )
            if self._lanes:
                self._wait_turn(("from", rank), "wait_signal", deadline)
            self._memory.wait_signal(rank, deadline)
            return DONE

    def flush(self, rank: int | None = None, timeout: float | None = None, *, async_op: bool = False) -> Work:
        """Complete when everything issued to `rank` (None: to all ranks) has taken effect there."""
        with self._calls:
            rank, deadline = None if rank is None else self._check_rank(rank), self._deadline(timeout)
            before = [key for key in list(self._lanes) if key[0] == "to" and rank in (None, key[1])]
            if async_op and rank is not None:
                return self._issue(("to", rank), "flush", partial(self._memory.flush, rank, deadline), deadline)
            if async_op:
                issued = {key: self._lanes[key].last for key in before}
                return self._issue(("all", 0), "flush", partial(self._flush_all, issued, deadline), deadline)
            for key in before:
                self._wait_turn(key, "flush", deadline)
            self._memory.flush(rank, deadline)
            return DONE

    def settle(self) -> None:
        """Wait for the asynchronous calls, without `wait_signal`. Raises the error of one that no `wait` has raised."""
        for key in list(self._lanes):
            if key[0] != "from":
                self._wait_turn(key, "settle", self._settled_by + REPORT_SECONDS)
        if not self.closed:  # who closes a window gives up its pending calls
            self._untold.tell()

    def _flush_all(self, issued: dict[tuple[str, int], Work], deadline: float) -> None:
        for (_, rank), work in issued.items():
            _wait_for(work, rank, "flush", deadline)
        self._memory.flush(None, deadline)

    # -- the order of calls

    def _call(
        self, key: tuple[str, int], name: str, call: Callable[[], T], deadline: float, async_op: bool
    ) -> T | WindowWork[T]:
        if async_op:
            return self._issue(key, name, call, deadline)
        if self._lanes:
            self._wait_turn(key, name, deadline)
        return call()

    def _issue(self, key: tuple[str, int], name: str, call: Callable[[], T], deadline: float) -> WindowWork[T]:
        """Queue a call behind the earlier ones of its lane."""
        self._settled_by = max(self._settled_by, deadline)
        inference = torch.is_inference_mode_enabled()
        calls, work = self._calls, WindowWork[T](name)

        def body() -> None:
            with calls:
                work._value = call()

        def run() -> None:
            with torch.inference_mode(inference):  # as in the caller's thread
                work.run(body, None if key[0] == "from" else self._untold.note)

        with self._issuing:
            if key not in self._lanes:
                self._lanes[key] = Lane(f"holdfast-window-{key[0]}-{key[1]}", "a call of a window")
            self._lanes[key].issue(work, run)
        return work

    def _wait_turn(self, key: tuple[str, int], name: str, deadline: float) -> None:
        """Wait until the asynchronous calls of a lane have ended. Raises `OpTimeout`."""
        if (lane := self._lanes.get(key)) is not None:
            _wait_for(lane.last, key[1], name, deadline)

    # -- the end

    def close(self) -> None:
        """Stop exposing this rank's tensor, and release the other ranks' memory. Idempotent; not collective.

        The tensor keeps its values, in memory that other ranks cannot access. Calls in progress, those of other threads
        and asynchronous ones, raise `RegionGone`. If one does not end within ten seconds, raises HoldfastError and
        releases nothing. In a signal's handler that has interrupted a call, the memory is released once that has ended.
        """
        self._ended = True
        if self._info is not None:
            self._end_exposure()
        else:
            self._calls = _refused_calls(closed_here)

    def _end_exposure(self) -> None:
        if self._calls.over and not self._closing:  # the tensor had moved: closed by the call that noticed it
            self._end_lanes(time.monotonic() + _CLOSE_SECONDS)
            return
        self._closing = True
        self._calls.end()
        self._memory.leaving = True
        if not self._calls.when_left(self._end_exposure):
            run_shielded(self._release)

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        deadline = time.monotonic() + _CLOSE_SECONDS
        Wait(yields=0).until(
            lambda: not self._calls.running,
            lambda: None,
            deadline,
            lambda seconds: HoldfastError(
                f"a window of rank {self.rank} cannot be closed: a call of another thread did not end within "
                f"{seconds:.0f} s; what it uses is kept until the process ends"
            ),
        )
        self._end_lanes(deadline)
        self._memory.close()
        self._exposed = None

    def _end_lanes(self, deadline: float) -> None:
        """End the threads of asynchronous calls; those that have not begun fail."""
        with self._issuing:
            lanes = list(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.end(deadline - time.monotonic())

    def close_when_left(self, then: Callable[[], None]) -> bool:
        """Close. If a signal's handler asks for it inside a call, `then` is called after that; else False."""
        self.close()
        return self._calls.when_left(then)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._timeout if timeout is None else seconds(timeout))

    def _check_rank(self, rank: int) -> int:
        number = integer(rank, "rank")
        if not 0 <= number < len(self._elements):
            raise ValueError(f"rank={number} is out of range: ranks are 0 to {len(self._elements) - 1}")
        return number

    def _checked(self, tensor: Tensor, rank: int, offset: int) -> int:
        """The byte offset of a transfer. Raises ValueError unless it fits into the window of `rank`, a valid rank."""
        offset = integer(offset, "offset")
        if tensor.dtype != self.dtype or not tensor.is_cpu:
            raise ValueError(f"the window holds {self.dtype} on cpu, not {tensor.dtype} on {tensor.device}")
        elements, end = self._elements[rank], offset + tensor.numel()
        if offset < 0 or end > elements:
            raise ValueError(f"elements {offset} to {end} are outside rank {rank}'s window of {elements}")
        return offset * self._itemsize

    def _element(self, rank: int, index: int, *values: int) -> tuple[int, int, list[int]]:
        """Check the arguments of an atomic: return the rank, the byte offset of the element, and `values` as ints."""
        rank, index = self._check_rank(rank), integer(index, "index")
        numbers = [integer(value, "value") for value in values]
        if self.dtype not in ATOMIC_DTYPES:
            raise Unsupported(f"atomics on {self.dtype}", "use a window of int32 or int64")
        elements = self._elements[rank]
        if not 0 <= index < elements:
            raise ValueError(f"element {index} is outside rank {rank}'s window of {elements}")
        least, most = _RANGES[self.dtype]
        for value in numbers:
            if not least <= value <= most:
                raise ValueError(f"{value} does not fit in {self.dtype}")
        return rank, index * self._itemsize, numbers


def _wait_for(work: Work, rank: int, name: str, deadline: float) -> None:
    """Wait until an earlier call has ended, well or not. Raises `OpTimeout`, which names the rank of that call."""
    began = time.monotonic()
    if not work.ends_within(max(deadline - began, 0.0)):
        raise OpTimeout(name, 0, time.monotonic() - began, (rank,))


def _refused_calls(refusal: Callable[[], RegionGone]) -> _native.ActiveCalls:
    """The calls of a window without a tensor: each is refused."""
    calls = _native.ActiveCalls(refusal)
    calls.end()
    return calls


def _no_tensor() -> RegionGone:
    return RegionGone("no tensor is registered with this window; all ranks must call register(tensor) first")


def _close_moved(memory: WindowMemory, rank: int, alone: bool) -> RegionGone:
    """The error for a window after its tensor got other memory. Closes the window if no other thread is in a call."""
    if alone:
        memory.leaving = True
        memory.close()
    return moved_error(f"a window of rank {rank}")


def check_exposable(tensor: Tensor) -> None:
    """Raise ValueError unless a window can expose `tensor`: contiguous, and not computed by autograd."""
    if not tensor.is_contiguous():
        raise ValueError("a window needs a contiguous tensor: its elements are addressed by number")
    if tensor.requires_grad and not tensor.is_leaf:
        raise ValueError("a window cannot be made of a tensor that autograd computed; use tensor.detach()")


def shapes_of_all(transport: Transport, tensor: Tensor, deadline: float) -> tuple[tuple[int, ...], ...]:
    """The shapes of all ranks' tensors; collective. Raises `Mismatch` on all ranks unless all have one dtype."""
    shape = [*tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())]
    own = _SHAPE.pack(DTYPE_CODE[tensor.dtype], tensor.dim(), *shape)
    rows = [_SHAPE.unpack(row) for row in gather_bytes(transport, own, deadline)]
    for rank, (code, *_) in enumerate(rows):
        if code != rows[0][0]:
            raise Mismatch(
                f"rank {rank} exposes {DTYPES[code]} in a window, rank 0 {DTYPES[rows[0][0]]}; all ranks must "
                "pass one dtype (view the tensors as uint8 to exchange bytes)"
            )
    return tuple(row[2 : 2 + row[1]] for row in rows)
