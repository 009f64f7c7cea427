"""Sends Python objects between ranks as msgpack: unlike pickle, decoding runs no received code.

Each is one op of the communicator: the lengths, then the bytes. An object that cannot be sent takes its turn like any
other: its rank sends the reason instead, and the op raises TypeError where the object was awaited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import torch

from holdfast.comms.errors import CorruptData, again
from holdfast.comms.work import Work

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

T = TypeVar("T")
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


def broadcast(comm: Communicator, obj: T | None, src: int, timeout: float | None, async_op: bool) -> ObjectWork[T]:
    """Rank `src`'s object on every rank."""
    sent = _EncodedObject(obj) if comm.rank == src else None
    received: list[bytes] = []

    def body(deadline: float) -> None:
        transport = comm.transport
        length = _length(sent, comm)
        transport.broadcast(length, src, deadline)
        buffer = _tensor(sent.data if sent is not None else bytes(abs(int(length.item()))), comm)
        transport.broadcast(buffer, src, deadline)
        received.append(_received(int(length.item()), buffer))

    nbytes = 0 if sent is None else sent.size
    work = comm.issue("broadcast_object", nbytes, body, lambda: f"from {src}", timeout, src, async_op)
    return ObjectWork(work, lambda: _result(sent, lambda: _decoded(received[0], src)))


def all_gather(comm: Communicator, obj: T, timeout: float | None, async_op: bool) -> ObjectWork[list[T]]:
    """Every rank's object in rank order."""
    sent = _EncodedObject(obj)
    received: list[bytes] = []

    def body(deadline: float) -> None:
        transport = comm.transport
        lengths = torch.zeros(comm.size, dtype=torch.int64, device=comm.device)
        transport.all_gather_single(lengths, _length(sent, comm), deadline)
        sizes = lengths.tolist()
        outputs = [_tensor(bytes(abs(size)), comm) for size in sizes]
        transport.all_gather(outputs, _tensor(sent.data, comm), deadline)
        received.extend(map(_received, sizes, outputs))

    work = comm.issue("all_gather_object", sent.size, body, lambda: "", timeout, async_op=async_op)
    return ObjectWork(work, lambda: _result(sent, lambda: _decoded_all(received)))


def gather(comm: Communicator, obj: T, dst: int, timeout: float | None, async_op: bool) -> ObjectWork[list[T] | None]:
    """Every rank's object in rank order on rank `dst`; None on the others."""
    sent = _EncodedObject(obj)
    received: list[bytes] = []

    def body(deadline: float) -> None:
        transport, root = comm.transport, comm.rank == dst
        lengths = [_length(None, comm) for _ in range(comm.size * root)]
        transport.gather(_length(sent, comm), lengths if root else None, dst, deadline)
        sizes = [int(length.item()) for length in lengths]
        outputs = [_tensor(bytes(abs(size)), comm) for size in sizes]
        transport.gather(_tensor(sent.data, comm), outputs if root else None, dst, deadline)
        received.extend(map(_received, sizes, outputs))

    work = comm.issue("gather_object", sent.size, body, lambda: f"to {dst}", timeout, dst, async_op)
    return ObjectWork(work, lambda: _result(sent, lambda: _decoded_all(received) if comm.rank == dst else None))


def scatter(
    comm: Communicator, objects: Sequence[T] | None, src: int, timeout: float | None, async_op: bool
) -> ObjectWork[T]:
    """Element i of rank `src`'s list on rank i."""
    sent = [_EncodedObject(obj) for obj in objects or ()]
    received: list[bytes] = []

    def body(deadline: float) -> None:
        transport, root = comm.transport, comm.rank == src
        length = _length(None, comm)
        transport.scatter(length, [_length(each, comm) for each in sent] if root else None, src, deadline)
        buffer = _tensor(bytes(abs(int(length.item()))), comm)
        transport.scatter(buffer, [_tensor(each.data, comm) for each in sent] if root else None, src, deadline)
        received.append(_received(int(length.item()), buffer))

    nbytes = sum(each.size for each in sent)
    work = comm.issue("scatter_object", nbytes, body, lambda: f"from {src}", timeout, src, async_op)
    refused = next((each for each in sent if each.error is not None), None)
    return ObjectWork(work, lambda: _result(refused, lambda: _decoded(received[0], src)))


def send(
    comm: Communicator, obj: object, dst: int, tag: int, timeout: float | None, async_op: bool
) -> ObjectWork[None]:
    """Send an object to rank `dst`: two messages under one tag."""
    sent = _EncodedObject(obj)

    def body(deadline: float) -> None:
        comm.transport.send(_length(sent, comm), dst, tag, deadline)
        comm.transport.send(_tensor(sent.data, comm), dst, tag, deadline)

    work = comm.issue("send_object", sent.size, body, None, timeout, dst, async_op)
    return ObjectWork(work, lambda: _result(sent, lambda: None))


def recv(comm: Communicator, src: int, tag: int, timeout: float | None, async_op: bool) -> ObjectWork[Any]:
    """Receive the object that rank `src` sent under `tag`."""
    received: list[bytes] = []

    def body(deadline: float) -> None:
        length = _length(None, comm)
        comm.transport.recv(length, src, tag, deadline)
        buffer = _tensor(bytes(abs(int(length.item()))), comm)
        comm.transport.recv(buffer, src, tag, deadline)
        received.append(_received(int(length.item()), buffer))

    work = comm.issue("recv_object", 0, body, None, timeout, src, async_op)
    return ObjectWork(work, lambda: _decoded(received[0], src))


_SENT, _REFUSED = b"\0", b"\1"


class _EncodedObject:
    """An object's bytes; or the reason why it cannot be sent, as bytes and as an error."""

    def __init__(self, obj: object) -> None:
        self.error: TypeError | None = None
        try:
            self.data = encode_object(obj)
        except TypeError as error:
            self.error = error.with_traceback(None)
            self.data = str(error).encode(errors="replace") or b"?"

    @property
    def size(self) -> int:
        return len(self.data)


def _length(sent: _EncodedObject | None, comm: Communicator) -> Tensor:
    """The length of a message: negative if it says why there is no object, 0 as a place for one."""
    size = 0 if sent is None else sent.size
    return torch.tensor([-size if sent is not None and sent.error is not None else size], device=comm.device)


def _result(sent: _EncodedObject | None, result: Callable[[], Result]) -> Result:
    """What the op is for, or the error of the object that this rank could not send."""
    if sent is not None and sent.error is not None:
        raise again(sent.error)
    return result()


def _received(length: int, buffer: Tensor) -> bytes:
    return (_REFUSED if length < 0 else _SENT) + buffer.cpu().numpy().tobytes()


def _decoded(message: bytes, rank: int) -> Any:
    if message[:1] == _REFUSED:
        raise TypeError(f"rank {rank} could not send its object: {message[1:].decode(errors='replace')}")
    try:
        return decode_object(message[1:])
    except msgspec.DecodeError as error:
        raise CorruptData(f"rank {rank} sent {len(message) - 1} bytes that are not an object: {error}") from error


def _decoded_all(messages: Sequence[bytes]) -> list[Any]:
    return [_decoded(message, rank) for rank, message in enumerate(messages)]


def _tensor(data: bytes, comm: Communicator) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=comm.device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)


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
