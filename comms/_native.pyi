"""The compiled part (comms/native/): a board's waits, small ops and large ones; reductions of memory."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

class Board:
    """One rank's hands on a board; sizes in bytes. Calls may come from any thread, but one op at a time."""

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
        """Raise a flag of this rank, and wake those who sleep."""

    def sleep_wait(self, rank: int, value: int, flag: int, /) -> bool:
        """Whether `rank` (the size of the board: every other rank) has raised a flag to `value`. Sleeps for at most
        2 ms, until it is so or `is_over`."""

    def is_over(self) -> bool:
        """Whether another rank has said that no more ops can end here."""

    def stop(self) -> None:
        """Let every look, now and later, end at once."""

    def stop_spinning(self, value: int, /) -> None:
        """Let every look for less than `value`, now and later, end before it gives way."""

    def wake(self, rank: int, /) -> None:
        """Wake `rank` if it sleeps."""

    def wake_all(self) -> None: ...
    def prepare_wait(self) -> None:
        """Say that this rank is about to sleep. What is looked at from here on is not missed by `futex_wait`."""

    def futex_wait(self) -> None:
        """Sleep until somebody rings, for at most 2 ms."""

    def finish_wait(self) -> None: ...
    def yield_cpu(self) -> None: ...
    @property
    def number(self) -> int:
        """Of the newest op."""

    def next(self) -> int:
        """The number of one more op."""

    def publish(self, op: int, signature: int, inputs: tuple[int, ...], /) -> int:
        """Publish (address, nbytes) of each input: 1 if they were copied into the slot, 0 if not, -1 if a rank still
        reads what the slot held before."""

    def exchange(
        self, op: int, signature: int, inputs: tuple[int, ...], into: tuple[int, ...], index: int, own: int, /
    ) -> int:
        """`publish`; copy what this rank keeps from `own` to its place among `into`; `meet_all`; `collect`; say that it
        has taken all it needs. As `publish`, and 2 more unless all have published the same, or 4 more if all of it was
        done."""

    def reduce(
        self, op: int, signature: int, inputs: tuple[int, ...], index: int, kind: int, into: int, nbytes: int, /
    ) -> int:
        """`publish`; `meet_all`; `combine`; say that this rank has taken all it needs. As `exchange`."""

    def match(self, rank: int, op: int, /) -> int:
        """-1 once `rank` has published the same, -2 if that takes long, else `rank`: its op is another."""

    def match_all(self, op: int, /) -> int:
        """The same of every rank."""

    def input(self, rank: int, op: int, index: int, /) -> tuple[int, bool]:
        """The size of an input, and whether it lies in the slot."""

    def fetch(self, rank: int, op: int, index: int, into: int, nbytes: int, /) -> int:
        """Copy an input out of its slot: -1 if done, else the size that it has."""

    def collect(self, op: int, index: int, into: tuple[int, ...], /) -> int:
        """Copy an input of every other rank out of its slot, to (address, nbytes) for each rank: -1 if done, -2 if they
        are not all in slots, else a rank whose input has another size. `into` may be empty."""

    def combine(self, op: int, index: int, kind: int, into: int, nbytes: int, /) -> int:
        """Reduce an input of all ranks: -1 if done, else a rank whose input has another size."""

    def begin(
        self,
        op: int,
        longest: int,
        kind: int,
        reduces_all: bool,
        shared: bool,
        give: tuple[int, ...],
        take: tuple[int, ...],
        own: int,
        /,
    ) -> None:
        """Set up a pipeline, unless this is the op that is under way. `give` and `take`: (address, nbytes) for each
        rank; `longest` is the size of the longest piece that any gives to another. kind -1: nothing is reduced."""

    def run(self) -> tuple[int, int, int] | None:
        """Go on with it: None once complete, else the (rank, value, flag) that keeps it, or (rank, error number, -1):
        that rank's memory cannot be read."""

class Order:
    """Whose turn it is among the ops of one communicator."""

    seq: int
    """How many ops were issued."""
    joint: int
    """How many of them were of all ranks together."""
    over: bool
    """No more can run."""
    queued: bool
    """Some wait for their turn."""

    @property
    def busy(self) -> bool:
        """Whether one is being issued, or runs in the thread that issued it."""

    @property
    def begun(self) -> bool:
        """Whether that one was begun on a fast path, which has told the journal."""

    def enter(self) -> bool:
        """Begin to issue an op, unless another is being issued; one that a fast path has begun goes on."""

    def leave(self) -> None: ...

class _FastPath:
    """See `holdfast.comms.transport.base.FastPath`."""

    def all_reduce(self, tensor: Any, op: Any, /) -> bool: ...
    def reduce_scatter(self, output: Any, tensor: Any, op: Any, /) -> bool: ...
    def broadcast(self, tensor: Any, src: int, /) -> bool: ...
    def all_gather(self, output: Any, tensor: Any, /) -> bool: ...
    def all_to_all(self, output: Any, tensor: Any, /) -> bool: ...
    def barrier(self) -> bool: ...

class BoardPath(_FastPath):
    """Ops over a board.

    `plan(op, tensor, root, reduction)` says by which signature and kind an op is called, None if it is not for
    this path. Nothing is done while `observers.observed`. A journal that is not None hears of each op.
    """

    def __init__(self, board: Board, order: Order, plan: Any, observers: Any, journal: Any) -> None: ...

class CallPath(_FastPath):
    """Ops that are called: what `plan`, as above, returns is given an op's output, tensor and deadline, as far as it
    has them. `failed(op, seq, joint, error)` is called with the error of an op, and raises.
    """

    def __init__(
        self, rank: int, size: int, order: Order, plan: Any, observers: Any, journal: Any, timeout: float, failed: Any
    ) -> None: ...

class GroupCall:
    """An op on one tensor by a process group of torch's: `holder.group.op([tensor], options)`, and a wait of `limit`
    for it. With a RuntimeError, `failed(work or None, error, deadline)` ends the wait or raises.
    """

    def __init__(
        self,
        holder: object,
        group: str,
        op: str,
        options: object,
        limit: timedelta,
        failed: Callable[[Any, RuntimeError, float], None],
    ) -> None: ...
    def __call__(self, tensor: Any, deadline: float, /) -> None: ...

class RequestCall:
    """An all_reduce of Open MPI on one tensor of `nbytes`, in place: `begin` and `test` are the addresses of
    MPI_Iallreduce and MPI_Test, `place`, `kind`, `op` and `comm` what MPI takes, as numbers; `looks` says how often it
    asks whether the op is complete. If it is not then, or MPI reports an error, `go_on(request, code, tensor,
    deadline)` completes it or raises (no request: 0). `holder.count` is one more each time. ValueError for a tensor of
    another size.
    """

    def __init__(
        self,
        holder: object,
        count: str,
        nbytes: int,
        begin: int,
        place: int,
        elements: int,
        kind: int,
        op: int,
        comm: int,
        test: int,
        max_tests: int,
        finish_request: Callable[[int, int, Any, float], None],
    ) -> None: ...
    def __call__(self, tensor: Any, deadline: float, /) -> None: ...

class PersistentCall:
    """The same by a persistent `request` of mpi4py, whose handle lies at the address `handle`, on the bytes of `stage`:
    the tensor is copied there before MPI_Start, which lies at `start`, and has what is there afterwards.
    """

    def __init__(
        self,
        holder: object,
        count: str,
        stage: bytearray,
        start: int,
        request: object,
        handle: int,
        test: int,
        max_tests: int,
        finish_request: Callable[[int, int, Any, float], None],
    ) -> None: ...
    def __call__(self, tensor: Any, deadline: float, /) -> None: ...

class ActiveCalls:
    """The calls of a window that are under way, each inside of this context manager; one after the end raises
    `refusal()`. Once `tensor` has other memory or another size than it has now, a call raises `left(alone)`; it is the
    end if no other was under way, which `alone` says.
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
        """Let none begin; whether this was the first to say so."""

class WindowBounds:
    """The windows of all ranks, of these sizes in bytes, with elements `like` those of a tensor."""

    def __init__(self, like: Any, sizes: tuple[int, ...]) -> None: ...
    def byte_offset(self, tensor: Any, rank: int, offset: int, /) -> int:
        """The byte at which a transfer from element `offset` on begins; -1 if it must be looked at more closely: it
        does not fit, or the tensor is not plain, or of another dtype.
        """

class Words:
    """8-byte words in `memory` that other processes or threads change too. To read one is an acquire, to write one a
    release: a reader that sees a word sees what its writer had written before. See native/board/words.h.
    """

    def __init__(self, memory: Any) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...
    def release(self) -> None:
        """Let go of the memory: from here on every access is an IndexError."""

def fence() -> None:
    """Put all that this thread has read and written before all that follows: between writing one word and reading
    another, which acquires and releases leave open.
    """

def kind(dtype: str, op: str, /) -> int:
    """The number of a reduction of a dtype ("float32") by an op ("sum"); -1 if there is none."""

def combine(kind: int, out: int, a: int, b: int, count: int, /) -> None:
    """out = a op b for `count` numbers at these addresses; `out` may be `a` or `b`."""

def copy(into: int, from_: int, nbytes: int, /) -> None:
    """Copy between two addresses of this process; nothing where they are one."""

def copy_process(pid: int, writes: bool, most: int, /, *pieces: int) -> int:
    """Copy (address here, address there, nbytes) of each of up to 8 pieces from process `pid`, or to it, in order and
    at most `most` bytes a system call. Returns the bytes that were moved; OSError if none could be.
    """

def pieces(address: int, nbytes: int, count: int, but: int = ..., /) -> tuple[int, ...]:
    """Memory in `count` pieces: (address, nbytes) of each, flat. Piece `but` is said to be empty."""

def sum_exactly(dtype: str, out: int, count: int, inputs: tuple[int, ...], /) -> int:
    """The correctly rounded sums of `count` floats at each of up to 256 addresses. Returns how many were done: it stops
    before 1024 of them that need more than two doubles, or hold what is not finite. `out` may be one of the inputs."""

def make_nans_alike(dtype: str, address: int, count: int, /) -> None:
    """Put torch's own NaN in place of every one among `count` floats."""

def register_tensor_type(
    example: Any,
    storage_nbytes: int,
    storage_offset: int,
    locate: Callable[[Any], tuple[int, int]],
    /,
) -> None:
    """Let `plain` and `span` be quick with tensors of the example's type, by the addresses of torch's C functions for a
    tensor's storage; `locate` is asked for the address and size of all others. AttributeError or ValueError if the
    type does not say where its tensors lie as DLPack 1 has it."""

def plain(tensor: Any, /) -> bool:
    """Whether it is dense CPU memory in row-major order that can be taken as it is: outside autograd, and holding the
    numbers themselves. False for what is no tensor, and for complex numbers."""

def span(tensor: Any, /) -> tuple[int, int]:
    """The address and the size in bytes of a contiguous tensor."""
