"""The compiled part (comms/native/): a board's waits, small ops and large ones; reductions of memory."""

from collections.abc import Callable
from typing import Any

from holdfast.comms.work import Work

class Board:
    """One rank's view of a board; sizes in bytes. Any thread may call it, but only one op runs at a time."""

    def __init__(
        self,
        memory: Any,
        rank: int,
        size: int,
        epoch: int,
        row: int,
        table: int,
        places: int,
        slots: int,
        slot: int,
        stage: int,
        block: int,
        depth: int,
        spins: int,
        yields: int,
        pids: tuple[int, ...],
    ) -> None: ...
    def release(self) -> None: ...
    def raise_flag(self, value: int, flag: int, /) -> None:
        """Raise a flag of this rank, and wake sleeping ranks."""

    def is_over(self) -> bool:
        """Whether another rank has aborted, so that no more ops can complete here."""

    def stop(self) -> None:
        """End all polling at once, now and later."""

    def stop_spinning(self, value: int, /) -> None:
        """Do not yield in waits for less than `value`, now and later."""

    def wake(self, rank: int, /) -> None:
        """Wake `rank` if it sleeps."""

    def wake_all(self) -> None: ...
    def sleep_until(self, ready: Callable[[], bool], /) -> bool:
        """Sleep until `ready()`, which is called after each wake-up.

        Returns whether that is so, after at most 2 ms, or as soon as `is_over`.
        """

    @property
    def number(self) -> int:
        """The number of the newest op that is complete."""

    @property
    def roots_before(self) -> int:
        """A digest of the roots of all ops before the one that was published last."""

    def run(
        self, signature: int, kind: int, give: tuple[int, ...], take: tuple[int, ...], /
    ) -> tuple[int, int, int, int] | None:
        """Run the next op, or resume it. kind: the number of its reduction, -1 for a move. None once it is complete.

        `give` and `take` hold (address, nbytes) of this rank's inputs and outputs: one, or one for each rank.
        Else it returns (why, rank, value, flag): it waits until that rank (the size of the board: every other rank) has
        raised the flag to the value (1); its memory cannot be read, for an error number (2); it published another op
        (3); its input has `value` bytes instead of `flag` (4).
        """

class Order:
    """Which thread may issue an op of a communicator."""

    seq: int
    """The number of ops issued."""
    joint: int
    """The number of those that all ranks share."""
    over: bool
    """Whether no more ops can run."""
    queued: bool
    """Whether ops are queued."""

    @property
    def busy(self) -> bool:
        """Whether an op is being issued, or runs in the thread that issued it."""

    @property
    def begun(self) -> bool:
        """Whether that op was begun on a fast path, which has told the journal."""

    @property
    def lost(self) -> bool:
        """Whether an op was begun on a fast path, and interrupted before it was completed."""

    @property
    def idle(self) -> bool:
        """Whether no op runs; one that was begun on a fast path looks at `over` before it goes on."""

    def __enter__(self) -> bool:
        """Begin to issue an op, and leave at the end of the block; False if another thread or block issues one.

        Resumes an op that a fast path has begun. No signal's handler interrupts between this and the block.
        """

    def __exit__(self, *error: object) -> None: ...
    def when_left(self, call: Callable[[], None], /) -> bool:
        """Call it when the op of this thread, which a signal's handler has interrupted, has ended.

        False if this thread is in no op.
        """

class FastPath:
    """Runs the most frequent ops without the general argument checks and bookkeeping.

    Each method returns the op's work: `done` once it is complete, and with `async_op` what its function has returned.
    On None the op may have begun: the caller must issue it through the general path with the same arguments, which
    continues it. A fast path declines unusual arguments, ops while `observers.observed`, and ops behind one that is
    still running; it never refuses an op with an error.

    `plan(op, tensor, root, reduction, async_op)` is called once for each kind of op: it returns an `OpPlan`, which runs
    over the `board`, or without a board a function of the op's output, tensor and deadline, as far as the op has them;
    None if the op is not for this path. A journal that is not None is told of each op. `failed(op, seq, joint, error)`
    is called with the error of a function, and raises. `device`: DLPack's kind and number of the tensors' device.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        order: Order,
        plan: Any,
        observers: Any,
        journal: Any,
        timeout: float,
        failed: Any,
        device: tuple[int, int],
        board: Board | None,
        done: Work,
    ) -> None: ...
    def all_reduce(self, tensor: Any, op: Any, async_op: bool, /) -> Work | None: ...
    def reduce_scatter(self, output: Any, tensor: Any, op: Any, async_op: bool, /) -> Work | None: ...
    def broadcast(self, tensor: Any, src: int, async_op: bool, /) -> Work | None: ...
    def all_gather(self, output: Any, tensor: Any, async_op: bool, /) -> Work | None: ...
    def all_to_all(self, output: Any, tensor: Any, async_op: bool, /) -> Work | None: ...
    def barrier(self, async_op: bool, /) -> Work | None: ...

class PreparedOp:
    """One op with its arguments, to be started many times. `comm.prepare` makes it.

    `path`, if it is not None, is a fast path, and `op` one of its ops with these `arguments`. A start that it does not
    complete, or that has options, calls `general(async_op, timeout)`. `done` is what other starts return.
    """

    def __init__(
        self, path: Any, op: str, arguments: tuple[Any, ...], general: Callable[..., Work], done: Work
    ) -> None: ...
    def start(self, async_op: bool = False, timeout: float | None = None) -> Work:
        """Run the op on the tensors as they are now. Options and errors are those of the plain call."""

    def __call__(self, async_op: bool = False, timeout: float | None = None) -> Work:
        """As `start`."""

class OpCall:
    """Ops of one plan over another library: start one, poll it, and leave what takes longer or fails to the slow path.

    `start(*tensors, deadline)` returns a request, or None if the op is complete. `is_complete(request)` is called up to
    `polls` times. Then, or after a RuntimeError of either, `finish_late(request or None, error or None, *tensors,
    deadline)` completes the op or raises. With a `stage` the op runs on that: the first tensor is copied to it and
    back, and must have its size (ValueError). `under_way`, where `start` keeps what the op accesses, is empty after it.
    """

    def __init__(
        self,
        start: Callable[..., Any],
        is_complete: Callable[[Any], Any],
        finish_late: Callable[..., None],
        polls: int = 1,
        stage: bytearray | None = None,
        under_way: list[Any] = ...,
    ) -> None: ...
    def __call__(self, *arguments: Any) -> None: ...

class ActiveCalls:
    """Counts the calls of a window under way; each runs inside this context manager.

    A call after the end raises `refusal()`. Once `tensor` has moved or changed its size, a call raises `moved(alone)`;
    if no other call was under way, `alone` is true and that is the end.
    """

    def __init__(
        self, refusal: Callable[[], BaseException], tensor: Any = ..., moved: Callable[[bool], BaseException] = ...
    ) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    @property
    def running(self) -> int: ...
    @property
    def over(self) -> bool: ...
    def end(self) -> bool:
        """End: no call begins any more. Whether this was the first call of `end`."""

    def when_left(self, call: Callable[[], None], /) -> bool:
        """Call it when the calls under way have ended, if this thread is inside one; False if it is not."""

class WindowBounds:
    """Checks transfers against the windows of all ranks: their sizes in bytes, elements of the dtype of `like`."""

    def __init__(self, like: Any, sizes: tuple[int, ...]) -> None: ...
    def byte_offset(self, tensor: Any, rank: int, offset: int, /) -> int:
        """The byte at which a transfer from element `offset` on begins.

        -1 if Python has to check it: it does not fit, or the tensor is not plain or of another dtype.
        """

class Words:
    """8-byte words in `memory` that other processes or threads change too.

    A read is an acquire, a write a release: a reader that sees a word sees all that its writer wrote before. See
    native/board/words.c.
    """

    def __init__(self, memory: Any) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...
    def release(self) -> None:
        """Release the memory: from here on every access is an IndexError."""

def kind(dtype: str, op: str, /) -> int:
    """The number of a reduction of a dtype ("float32") by an op ("sum"); -1 if it does not exist."""

def combine(kind: int, out: int, a: int, b: int, count: int, /) -> None:
    """out = a op b for `count` numbers at these addresses; `out` may be `a` or `b`."""

def copy(into: int, from_: int, nbytes: int, /) -> None:
    """Copy between two addresses of this process; nothing where they are one."""

def read_unlocked(descriptor: int, /) -> bytes | None:
    """The content of a file; None while it is locked (flock) by a process that writes to it. Keeps the GIL."""

def copy_process(pid: int, writes: bool, most: int, /, *pieces: int) -> int:
    """Copy (address here, address there, nbytes) of each of up to 8 pieces, in order, from process `pid` or to it.

    One system call copies at most `most` bytes. Returns the bytes copied; OSError if none could be.
    """

def diff_pieces(pieces: int, count: int, records: int, room: int, sizes: int, portable: bool, /) -> int:
    """Write what differs in `count` pieces as records, and their sizes; stop when `room` bytes may not suffice.

    Returns how many pieces are done. The other numbers are addresses: store/native/element_diff.c describes the
    memory there. `portable` uses no vector instructions.
    """

def patch_pieces(pieces: int, count: int, sums: int, /) -> int:
    """Make pieces from their bases and records, and their checksums; stop before one whose record is not its own.

    Returns how many pieces are done. `pieces` and `sums` are addresses, see store/native/element_diff.c. The
    records must not change meanwhile.
    """

def digest_copies(jobs: int, count: int, copies: int, sums: int, threads: int, /) -> None:
    """Copy pieces of memory, and compute the XXH3 checksum (64 bits) of each, by up to `threads` threads.

    `jobs`, `copies` and `sums` are the addresses of arrays of 64-bit numbers. A job is (source, nbytes, target, first,
    count): a piece of `nbytes` at `source` is copied to `target`, unless that is 0, and its checksum goes to the job's
    place in `sums`; then `count` copies from number `first` on are made. A copy is (source, target, rows, row_bytes,
    source_stride, target_stride). Pieces of fewer than 241 bytes get no checksum.
    """

def float8_encode(source: int, rows: int, row: int, block: int, codes: int, exponents: int, /) -> None:
    """Write dense rows of float32 as codes of float8 (e4m3) and an exponent of two (16 bits) for each block of a row.

    All but the counts are addresses. An infinity becomes NaN, a number in a block of zeros exponent 0.
    """

def float8_decode(
    codes: int, exponents: int, rows: int, row: int, first: int, block: int, into: int, stride: int, /
) -> None:
    """Write rows of float32, `stride` elements apart, from codes and exponents; finite numbers stay finite.

    Rows begin at element `first` of their first block.
    """

def sum_exactly(dtype: str, out: int, count: int, inputs: tuple[int, ...], /) -> int:
    """Compute the correctly rounded sums of `count` floats at each of up to 256 addresses.

    Returns how many were computed: it stops before 1024 of them that need more than two doubles, or are not all finite.
    `out` may be one of the inputs.
    """

def make_nans_alike(dtype: str, address: int, count: int, /) -> None:
    """Replace every NaN among `count` floats by torch's own."""

def register_tensor_type(
    example: Any,
    storage_nbytes: int,
    storage_offset: int,
    scalar_type: int,
    locate: Callable[[Any], tuple[int, int]],
    /,
) -> None:
    """Make `plain` and `span` fast for tensors of the type of `example`.

    They use the addresses of torch's C functions for a tensor's storage and dtype; `locate` finds the address and size
    of all other tensors. AttributeError or ValueError if the type does not describe its tensors as DLPack 1 does.
    """

def plain(tensor: Any, kind: int = ..., number: int = ..., /) -> bool:
    """Whether it is dense memory of that device (DLPack's kind and number; the CPU) that can be used directly.

    That means in row-major order, outside autograd, and holding the numbers themselves. False for what is no tensor,
    and for complex numbers.
    """

def span(tensor: Any, /) -> tuple[int, int]:
    """The address and the size in bytes of a contiguous tensor."""

def describe(tensors: list[Any], /) -> tuple[bytes, bytes] | None:
    """Address and size of each of several plain tensors (64 bits each), and a text for their dtypes and shapes.

    The texts of two lists are equal only if dtypes and shapes are. None if a tensor is not `plain`.
    """
