"""`Window`: one-sided access between the ranks of a communicator. Each exposes a tensor; all may read and write it.

Memory ordering: a rank's puts, atomics and signals to one target take effect in the order in which it issued them, and
`wait_signal` returns after everything that the signalling rank did to this one before. Between ranks that do not
signal each other there is no order. `fetch_add` and `compare_swap` of all ranks on one element are atomic with regard
to each other, but not with regard to put or to the owner's own use of its tensor.

Whether a rank that computes, sleeps or is stopped delays other ranks' ops on its memory depends on the transport:
`Capabilities.passive_target` says which it is, and the docstring of the transport's window says it for each op.

A window exposes the memory that its tensor has when the window is made. That memory is kept until the window is closed,
and torch refuses to resize it. If the tensor gets other memory nevertheless (`t.data = ...`, `set_`), the owner's next
call closes the window and raises `RegionGone`; until then the other ranks access the old memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from holdfast.comms import _native
from holdfast.comms.errors import HoldfastError, RegionGone, Unsupported
from holdfast.comms.quantities import integer, seconds
from holdfast.comms.system import forks
from holdfast.comms.system.signal_safety import run_shielded
from holdfast.comms.tensors.exposed import ExposedMemory, moved_error
from holdfast.comms.tensors.memory import plain_tensor
from holdfast.comms.tensors.overlap import check_outputs
from holdfast.comms.tensors.packing import packed, unpack
from holdfast.comms.transport.window_memory import WindowMemory, closed_here

Tensor = torch.Tensor

ATOMIC_DTYPES = (torch.int32, torch.int64)
_RANGES = {dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in ATOMIC_DTYPES}
_CLOSE_SECONDS = 10.0
_LOOK_SECONDS = 0.0002


class Window:
    """A window, made collectively by `Communicator.window`. Offsets and indices count elements. A context manager.

    A call is complete when it returns, unless the backend says that it needs a `flush`. Raises ValueError for an offset
    out of range, before any byte moves; `RegionGone` if the target rank closed its window or died.
    """

    def __init__(
        self,
        memory: WindowMemory,
        dtype: torch.dtype,
        rank: int,
        timeout: float,
        owner: object = None,
        tensor: Tensor | None = None,
    ) -> None:
        """`owner` is kept alive with the window. `tensor` is what this rank exposes, in the memory it has now."""
        self.dtype = dtype
        self._owner = owner
        self.rank = rank
        self._memory = memory
        self._itemsize = dtype.itemsize
        self._elements = [size // dtype.itemsize for size in memory.sizes]
        self._timeout = timeout
        self._exposed = None if tensor is None else ExposedMemory(tensor)
        self._closing, self._released = False, False
        if tensor is None:
            self._calls = _native.ActiveCalls(closed_here)
        else:
            self._calls = _native.ActiveCalls(closed_here, tensor, partial(_close_moved, memory, rank))
        self._bounds = _native.WindowBounds(torch.empty(0, dtype=dtype, device="cpu"), tuple(memory.sizes))
        forks.refuse_in_children(self, f"a window of rank {rank}", ("rank", "dtype"))

    @property
    def memory(self) -> WindowMemory:
        """The backend's part of the window."""
        return self._memory

    @property
    def closed(self) -> bool:
        """Whether this rank has closed the window."""
        return self._calls.over

    def put(self, src: Tensor, rank: int, offset: int = 0, timeout: float | None = None) -> None:
        """Copy `src` into the window of `rank`, from element `offset` on."""
        with self._calls:
            at = self._bounds.byte_offset(src, rank, offset)
            if at < 0:
                src = plain_tensor(src, "src")
                rank = self._check_rank(rank)
                at, src = self._checked(src, rank, offset), packed(src)
            self._memory.write(rank, at, src, self._deadline(timeout))

    def get(self, dst: Tensor, rank: int, offset: int = 0, timeout: float | None = None) -> None:
        """Fill `dst` from the window of `rank`, from element `offset` on."""
        with self._calls:
            at, flat = self._bounds.byte_offset(dst, rank, offset), dst
            if at < 0:
                dst = plain_tensor(dst, "dst")
                check_outputs([dst], ["dst"])
                rank = self._check_rank(rank)
                at, flat = self._checked(dst, rank, offset), packed(dst)
            self._memory.read(rank, at, flat, self._deadline(timeout))
            unpack(flat, dst)

    def fetch_add(self, rank: int, index: int, value: int, timeout: float | None = None) -> int:
        """Atomically add `value` to an element of the window of `rank`; return the old value."""
        with self._calls:
            rank, at, (value,) = self._element(rank, index, value)
            return self._memory.fetch_add(rank, at, self.dtype, value, self._deadline(timeout))

    def compare_swap(self, rank: int, index: int, expected: int, desired: int, timeout: float | None = None) -> int:
        """Atomically set an element of rank's window to `desired` if it is `expected`; return the old value."""
        with self._calls:
            rank, at, (expected, desired) = self._element(rank, index, expected, desired)
            return self._memory.compare_swap(rank, at, self.dtype, expected, desired, self._deadline(timeout))

    def signal(self, rank: int, timeout: float | None = None) -> None:
        """Send `rank` one signal: one of its `wait_signal` calls for this rank returns."""
        with self._calls:
            self._memory.signal(self._check_rank(rank), self._deadline(timeout))

    def wait_signal(self, rank: int, timeout: float | None = None) -> None:
        """Wait for one signal from `rank`, and consume it."""
        with self._calls:
            self._memory.wait_signal(self._check_rank(rank), self._deadline(timeout))

    def flush(self, rank: int | None = None, timeout: float | None = None) -> None:
        """Return when everything issued to `rank` (None: to all ranks) has taken effect there."""
        with self._calls:
            self._memory.flush(None if rank is None else self._check_rank(rank), self._deadline(timeout))

    def close(self) -> None:
        """Stop exposing this rank's tensor, and release the other ranks' memory. Idempotent; not collective.

        The tensor keeps its values, in memory that other ranks cannot access. Calls in progress in other threads raise
        `RegionGone`. If one does not end within ten seconds, raises HoldfastError and releases nothing. In a signal's
        handler that has interrupted a call, the memory is released once that has ended.
        """
        if self._calls.over and not self._closing:  # the tensor had moved: closed by the call that noticed it
            return
        self._closing = True
        self._calls.end()
        self._memory.leaving = True
        if not self._calls.when_left(self.close):
            run_shielded(self._release)

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._calls.running and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        if self._calls.running:
            raise HoldfastError(
                f"a window of rank {self.rank} cannot be closed: a call of another thread did not end within "
                f"{_CLOSE_SECONDS:.0f} s; what it uses is kept until the process ends"
            )
        self._memory.close()
        self._exposed = None

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
                raise ValueError(f"{value} is no {self.dtype}")
        return rank, index * self._itemsize, numbers


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
