"""Sends state to newcomers over the epoch's communicator, if no memory plane reaches them; packs state into bytes.

One rank that has the state sends a header, then chunks, each with its checksum. Small tensors share chunks, so that a
model of many small parameters needs few messages. If the source dies on the way, the epoch fails and the next one tries
again from another rank; a receiver changes nothing before it has everything. If the source's state cannot be sent, the
newcomers get the reason and end; the source goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
import xxhash

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch
from holdfast.comms.tensors.shared import check_agreement, groups_sharing_memory
from holdfast.ft.attempt import FAILURES
from holdfast.ft.state.codec import decode_state, encode_state

CHUNK = 16 << 20
"""The most bytes of a chunk that small tensors share; a larger tensor is a chunk of its own."""
ALIGNMENT = 16
MAX_HEADER = 1 << 30


class StateNotGiven(HoldfastError):
    """Rank `rank`, which holds the state of the job, cannot give it to newcomers, for `reason`."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank, self.reason = rank, reason
        super().__init__(
            f"rank {rank} cannot give its state to newcomers: {reason}; let state_dict() of what is attached return "
            "only what can travel"
        )


class Stateful(Protocol):
    """An object that can be attached to a session: a model, an optimizer, a scheduler, a data loader ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class PackedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor's place: its dtype and shape, and byte `offset` of chunk `chunk`."""

    dtype: str
    shape: list[int]
    chunk: int
    offset: int


class _TransferHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description of a transfer: `chunks` are (bytes, checksum); `refusal` says why no state comes, or is ""."""

    done: int
    description: bytes
    pieces: list[PackedTensor]
    chunks: list[tuple[int, bytes]]
    refusal: str = ""


_decoder = msgspec.msgpack.Decoder(_TransferHeader)


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result of a transfer: the number of steps `done` in the state, and the bytes moved."""

    done: int
    nbytes: int


class Pipe:
    """Moves tensors from rank `source` to `receivers`: by broadcast if those are all other ranks, else one by one."""

    def __init__(self, comm: Communicator, source: int, receivers: Sequence[int], timeout: float) -> None:
        self._comm, self.source, self._receivers, self._timeout = comm, source, tuple(receivers), timeout
        self._to_all = len(self._receivers) == comm.size - 1
        self.device = comm.device

    def give(self, tensor: torch.Tensor) -> None:
        tensor = tensor.to(self.device)
        if self._to_all:
            self._comm.broadcast(tensor, self.source, timeout=self._timeout)
            return
        for rank in self._receivers:
            self._comm.send(tensor, rank, timeout=self._timeout)

    def take(self, tensor: torch.Tensor) -> None:
        if self._to_all:
            self._comm.broadcast(tensor, self.source, timeout=self._timeout)
        else:
            self._comm.recv(tensor, self.source, timeout=self._timeout)


def send_state(
    pipe: Pipe,
    attached: Mapping[str, Stateful],
    done: int,
    before_chunk: Callable[[], None],
    on_refusal: Callable[[str], None],
) -> TransferResult:
    """Send the state of everything attached, after `done` committed steps.

    If the state cannot be sent, the receivers are refused, and `on_refusal` is called with the reason.
    """
    packed, refusal = PackedState(b"", [], []), ""
    try:
        packed = pack(attached, pipe.device)
    except FAILURES:
        raise
    except Exception as error:
        refusal = reason_of(error)
    sums = [(chunk.nbytes, _checksum(chunk)) for chunk in packed.chunks]
    header = msgspec.msgpack.encode(_TransferHeader(done, packed.description, packed.pieces, sums, refusal))
    pipe.give(torch.tensor([len(header)], device="cpu"))
    pipe.give(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    for chunk in packed.chunks:
        before_chunk()
        pipe.give(chunk)
    if refusal:
        on_refusal(refusal)
    return TransferResult(done, sum(chunk.nbytes for chunk in packed.chunks))


def reason_of(error: Exception) -> str:
    """The text of the error for which state cannot be sent."""
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()


def receive_state(
    pipe: Pipe,
    attached: Mapping[str, Stateful],
    before_chunk: Callable[[], None],
    before_load: Callable[[], None],
) -> TransferResult:
    """Receive state and load it into everything attached.

    Raises, before anything is loaded, `CorruptData` if a checksum is wrong; `Mismatch` if other things are attached at
    the source; `StateNotGiven` if the source's state cannot be sent.
    """
    length = torch.zeros(1, dtype=torch.int64, device=pipe.device)
    pipe.take(length)
    if not 0 < int(length) <= MAX_HEADER:
        raise CorruptData(f"a state's header of {int(length)} bytes")
    raw = torch.empty(int(length), dtype=torch.uint8, device=pipe.device)
    pipe.take(raw)
    try:
        header = _decoder.decode(raw.cpu().numpy().tobytes())
    except msgspec.DecodeError as error:
        raise CorruptData(f"not the header of a state: {error}") from error
    if header.refusal:
        raise StateNotGiven(pipe.source, header.refusal)
    chunks = []
    for number, (nbytes, checksum) in enumerate(header.chunks):
        before_chunk()
        chunk = torch.empty(nbytes, dtype=torch.uint8, device=pipe.device)
        pipe.take(chunk)
        if _checksum(chunk) != checksum:
            raise CorruptData(f"chunk {number} of a state ({nbytes} bytes) arrived with another checksum")
        chunks.append(chunk)
    state = unpack(PackedState(header.description, header.pieces, chunks))
    check_names(state, attached)
    before_load()
    load(state, attached)
    return TransferResult(header.done, sum(chunk.nbytes for chunk in chunks))


@dataclass(frozen=True, slots=True)
class PackedState:
    """A state as bytes: its description, the place of each tensor, and the chunks."""

    description: bytes
    pieces: list[PackedTensor]
    chunks: list[torch.Tensor]


def unpack(packed: PackedState) -> Any:
    """The state, each tensor in memory of its own. Raises `CorruptData` if its parts do not fit together."""
    return decode_state(packed.description, [_unpack(piece, packed.chunks) for piece in packed.pieces])


def check_names(state: Mapping[str, Any], attached: Mapping[str, Stateful]) -> None:
    """Raise `Mismatch` if the names in `state` differ from those attached here."""
    if state.keys() != attached.keys():
        raise Mismatch(
            f"attached here: {', '.join(sorted(attached)) or 'nothing'}; where the state comes from: "
            f"{', '.join(sorted(state)) or 'nothing'}; attach the same on every rank"
        )


def load(state: Mapping[str, Any], attached: Mapping[str, Stateful]) -> None:
    """Load the state of each attached thing.

    Raises `Mismatch`, before anything is loaded, if weights that are tied here differ in `state`: a module would keep
    the last one.
    """
    for name, thing in attached.items():
        if isinstance(thing, torch.nn.Module):
            _check_tied(name, thing.state_dict(), state[name])
    for name, thing in attached.items():
        thing.load_state_dict(state[name])


def _check_tied(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    plain = {key: each for key, each in here.items() if type(each) in (torch.Tensor, torch.nn.Parameter)}
    sources = {key: there[key] for key in plain if isinstance(there, Mapping) and type(there.get(key)) is torch.Tensor}
    targets = {
        key: plain[key].detach()
        for key, source in sources.items()
        if (plain[key].dtype, plain[key].shape) == (source.dtype, source.shape) and plain[key].device.type != "meta"
    }
    for group in groups_sharing_memory(targets):
        check_agreement({key: targets[key] for key in group}, sources, f"{name!r}")


def pack(attached: Mapping[str, Stateful], device: torch.device) -> PackedState:
    """The state of everything attached, as bytes on `device`. A chunk may be the memory of a tensor itself.

    Raises TypeError for state that cannot be sent.
    """
    description, tensors = encode_state({name: thing.state_dict() for name, thing in attached.items()})
    pieces: list[PackedTensor] = []
    contents: list[list[torch.Tensor]] = []
    open_chunk, filled = -1, 0
    for tensor in tensors:
        raw = _bytes_of(tensor).to(device)
        if raw.numel() >= CHUNK:
            pieces.append(_piece(tensor, len(contents), 0))
            contents.append([raw])
            continue
        padding = -filled % ALIGNMENT
        if open_chunk < 0 or filled + padding + raw.numel() > CHUNK:
            contents.append([])
            open_chunk, filled, padding = len(contents) - 1, 0, 0
        if padding:
            contents[open_chunk].append(torch.zeros(padding, dtype=torch.uint8, device=device))
        pieces.append(_piece(tensor, open_chunk, filled + padding))
        contents[open_chunk].append(raw)
        filled += padding + raw.numel()
    return PackedState(description, pieces, [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in contents])


def _piece(tensor: torch.Tensor, chunk: int, offset: int) -> PackedTensor:
    return PackedTensor(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), chunk, offset)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a tensor of at most one element counts as contiguous whatever its strides
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _unpack(piece: PackedTensor, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = getattr(torch, piece.dtype, None)
    if not isinstance(dtype, torch.dtype) or any(length < 0 for length in piece.shape):
        raise CorruptData(f"no tensor is {piece.dtype} of shape {piece.shape}")
    count = 1
    for length in piece.shape:
        count *= length
    nbytes = count * dtype.itemsize
    if not (0 <= piece.chunk < len(chunks) and 0 <= piece.offset <= chunks[piece.chunk].numel() - nbytes):
        raise CorruptData("a tensor of a state lies outside of its chunk")
    whole = chunks[piece.chunk]
    raw = whole[piece.offset : piece.offset + nbytes]
    if not nbytes:
        return torch.empty(piece.shape, dtype=dtype, device=raw.device)
    if raw.numel() < whole.numel():  # some callers read the whole storage of a tensor (torch.set_rng_state)
        raw = raw.clone()
    return raw.view(dtype).reshape(piece.shape)


def _checksum(chunk: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(chunk.cpu().numpy().data)
