"""Sends Python objects between ranks as msgpack: unlike pickle, decoding runs no received code.

Each is one op of the communicator: the lengths, then the bytes. An object that cannot be sent takes its turn like any
other: its rank sends the reason instead, and the op raises TypeError where the object was awaited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import torch

from holdfast.comms.errors import UNDECODABLE, CorruptData, again
from holdfast.comms.work import Work

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

Result = TypeVar("Result")
Tensor = torch.Tensor


class ObjectWork(Generic[Result]):
    """The handle of an op on objects that may still be running: `wait` returns what the op is for."""

    def __init__(self, work: Work, result: Callable[[], Result]) -> None:
        self._work, self._result = work, result

    def wait(self, timeout: float | None = None) -> Result:
        """Return the op's result when it is complete; raise its error, or `StillRunning` as `Work.wait`."""
        self._work.wait(timeout)
        return self._result()

    def done(self) -> bool:
        """True once the op is complete or has failed."""
        return self._work.done()

    def exception(self) -> BaseException | None:
        """The error that ended the op; None while it runs, and if it succeeded."""
        return self._work.exception()


Move = Callable[[Sequence[Tensor], Sequence[Tensor], float], None]
"""Runs the op of the transport on the tensors that this rank gives, and into those that it takes."""


def broadcast(comm: Communicator, obj: object, src: int, timeout: float | None, async_op: bool) -> Any:
    """Rank `src`'s object on every rank."""
    given = [_Message(obj)] if comm.rank == src else []
    exchange = _Exchange(
        comm, given, 1 - len(given), lambda given, taken, end: comm.transport.broadcast((given or taken)[0], src, end)
    )
    return exchange.run("broadcast_object", f"from {src}", src, timeout, async_op)


def all_gather(comm: Communicator, obj: object, timeout: float | None, async_op: bool) -> Any:
    """Every rank's object in rank order."""
    exchange = _Exchange(
        comm, [_Message(obj)], comm.size, lambda given, taken, end: comm.transport.all_gather(taken, given[0], end)
    )
    return exchange.run("all_gather_object", "", -1, timeout, async_op, every=True)


def gather(comm: Communicator, obj: object, dst: int, timeout: float | None, async_op: bool) -> Any:
    """Every rank's object in rank order on rank `dst`; None on the others."""
    count = comm.size if comm.rank == dst else 0
    exchange = _Exchange(
        comm, [_Message(obj)], count, lambda given, taken, end: comm.transport.gather(given[0], taken or None, dst, end)
    )
    return exchange.run("gather_object", f"to {dst}", dst, timeout, async_op, every=True)


def scatter(
    comm: Communicator, objects: Sequence[object] | None, src: int, timeout: float | None, async_op: bool
) -> Any:
    """Element i of rank `src`'s list on rank i."""
    given = [_Message(obj) for obj in objects or ()]
    exchange = _Exchange(
        comm, given, 1, lambda given, taken, end: comm.transport.scatter(taken[0], given or None, src, end)
    )
    return exchange.run("scatter_object", f"from {src}", src, timeout, async_op)


def send(comm: Communicator, obj: object, dst: int, tag: int, timeout: float | None, async_op: bool) -> Any:
    """Send an object to rank `dst`: two messages under one tag."""
    exchange = _Exchange(
        comm, [_Message(obj)], 0, lambda given, taken, end: comm.transport.send(given[0], dst, tag, end)
    )
    return exchange.run("send_object", None, dst, timeout, async_op, every=True)


def recv(comm: Communicator, src: int, tag: int, timeout: float | None, async_op: bool) -> Any:
    """Receive the object that rank `src` sent under `tag`."""
    exchange = _Exchange(comm, [], 1, lambda given, taken, end: comm.transport.recv(taken[0], src, tag, end))
    return exchange.run("recv_object", None, src, timeout, async_op)


_SENT, _REFUSED = b"\0", b"\1"
"""The first byte of a message: an object follows, or why there is none."""


class _Message:
    """An object's bytes; or the reason why it cannot be sent, as bytes and as an error."""

    def __init__(self, obj: object) -> None:
        self.error: TypeError | None = None
        try:
            self.data = _SENT + encode_object(obj)
        except TypeError as error:
            self.error = error.with_traceback(None)
            self.data = _REFUSED + str(error).encode(errors="replace")


class _Exchange(msgspec.Struct, frozen=True):
    """One op on objects: this rank gives some messages, and takes `count`: by `move`, first lengths, then bytes."""

    comm: Communicator
    given: Sequence[_Message]
    count: int
    move: Move

    def run(
        self, op: str, agreed: str | None, root: int, timeout: float | None, async_op: bool, *, every: bool = False
    ) -> Any:
        """Issue the op, and return its result, or an `ObjectWork`: the object of `root`, or with `every` all, or None.

        It raises the error of an object that this rank cannot send.
        """
        taken: list[bytes] = []
        nbytes = sum(len(message.data) for message in self.given)
        work = self.comm.issue(
            op, nbytes, partial(self._run, taken), None if agreed is None else lambda: agreed, timeout, root, async_op
        )

        def outcome() -> Any:
            for message in self.given:
                if message.error is not None:
                    raise again(message.error)
            if every:
                return [_decoded(message, rank) for rank, message in enumerate(taken)] or None
            return _decoded((taken or [self.given[0].data])[0], root)

        return ObjectWork(work, outcome) if async_op else outcome()

    def _run(self, taken: list[bytes], deadline: float) -> None:
        given, count, device, buffers = [message.data for message in self.given], self.count, self.comm.device, []
        own = [torch.tensor([len(data)], device=device) for data in given]
        if count:
            lengths = torch.empty((count, 1), dtype=torch.int64, device=device)
            self.move(own, lengths.unbind(), deadline)
            buffers = [torch.empty(length, dtype=torch.uint8, device=device) for (length,) in lengths.tolist()]
        else:
            self.move(own, buffers, deadline)
        self.move(
            [torch.frombuffer(bytearray(each), dtype=torch.uint8).to(device) for each in given], buffers, deadline
        )
        taken.extend(buffer.cpu().numpy().tobytes() for buffer in buffers)


def _decoded(message: bytes, rank: int) -> Any:
    if message[:1] == _REFUSED:
        raise TypeError(f"rank {rank} could not send its object: {message[1:].decode(errors='replace')}")
    try:
        return decode_object(message[1:])
    except UNDECODABLE as error:
        raise CorruptData(f"rank {rank} sent {len(message) - 1} bytes that are not an object: {error}") from error


_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_DEEPEST = 200
_KEYS = (str, int, float, bool, bytes, type(None))


def encode_object(obj: object) -> bytes:
    """Encode `obj`. Raises TypeError, naming the path, for a value that would arrive changed."""
    _check_object(obj, "the object", 0)
    try:
        return msgspec.msgpack.encode(obj)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{error}: {_HINT}") from error


def decode_object(data: bytes) -> Any:
    """Decode the output of `encode_object`."""
    return msgspec.msgpack.decode(data, strict=True)


_HINT = (
    "objects travel as msgpack (dicts, lists, strings, numbers, bytes, None), never as pickle; send tensors with "
    "broadcast or all_gather, and your own types as msgspec structs or dataclasses"
)


def _check_object(obj: object, path: str, depth: int) -> None:
    kind = type(obj)
    if kind in (str, float, bool, bytes, type(None)):
        return
    if kind is int:
        if not _LEAST <= obj <= _MOST:  # type: ignore[operator]
            raise TypeError(f"{path} is {_short(obj)}, which has more than 64 bits: {_HINT}")
        return
    if depth == _DEEPEST:
        raise TypeError(f"{path} is nested more than {_DEEPEST} levels deep: {_HINT}")
    for key, value in _members(obj, path):
        _check_object(value, f"{path}[{_short(key)}]", depth + 1)


def _members(obj: object, path: str) -> Iterator[tuple[object, object]]:
    """The keys and values of a container; TypeError for any other object."""
    if isinstance(obj, dict):
        for key in obj:
            if type(key) not in _KEYS:
                raise TypeError(f"a key of {path} is a {type(key).__name__}, not a string or number: {_HINT}")
            _check_object(key, f"a key of {path}", _DEEPEST)
        yield from obj.items()
    elif type(obj) is tuple or isinstance(obj, list):
        yield from enumerate(obj)
    elif isinstance(obj, msgspec.Struct):
        yield from ((name, getattr(obj, name)) for name in obj.__struct_fields__)
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        yield from ((field.name, getattr(obj, field.name)) for field in dataclasses.fields(obj))
    else:
        raise TypeError(f"{path} is a {type(obj).__name__}, which would arrive as another type: {_HINT}")


def _short(value: object) -> str:
    try:
        words = repr(value)
    except ValueError:  # Python refuses to print an int of that many digits
        words = "a number of thousands of digits"
    return words if len(words) <= 80 else f"{words[:77]}..."
