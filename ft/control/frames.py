"""The control protocol without I/O: frames, the mutual handshake, and sessions of authenticated messages.

A frame is a length (4 bytes, big endian, of what follows), a version byte, and a body. The handshake:

    dialler  -> Hello(nonce, job tag, identity)         the tag is an HMAC of the job's name
    listener -> Challenge(nonce)
    dialler  -> Proof(HMAC of both messages)            the listener now knows that the dialler has the key,
    listener -> Welcome(identity, HMAC of all of it)    and the dialler that the listener has
             or Refusal(why)

Neither key nor job name is sent. Each direction then has its own key, derived from the job's key and both nonces, and
each frame ends with a MAC over its number, its header and its payload: a frame that is forged, altered, replayed or
moved from another position, direction or connection does not verify, nor does one after an omitted frame. Nothing is
encrypted.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Annotated, Literal

import msgspec

from holdfast.comms.errors import UNDECODABLE
from holdfast.comms.system.keys import mac
from holdfast.ft.control.errors import (
    BadFrame,
    Busy,
    ControlError,
    ForgedFrame,
    FrameTooLarge,
    TruncatedFrame,
    UnknownVersion,
    WrongJob,
    WrongKey,
)

VERSION = 1
FRAME_LIMIT = 1 << 20
"""The most bytes in the payload of one frame."""
HANDSHAKE_LIMIT = 1024
MAC_BYTES = 16
MIN_KEY_BYTES = 16
MAX_IDENTITY = 200
"""The most characters in an identity."""

_HEADER = struct.Struct("!IB")
_NUMBER = struct.Struct("!Q")

Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Identity = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_IDENTITY)]
Reason = Literal["key", "job", "version", "busy", "form"]


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    nonce: Nonce
    job_tag: Nonce
    identity: Identity


class Challenge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    mac: Nonce


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    identity: Identity
    mac: Nonce


class Refusal(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    reason: Reason


_encode = msgspec.msgpack.Encoder().encode
Message = Hello | Challenge | Proof | Welcome | Refusal
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def frame(body: bytes) -> bytes:
    """`body` with its header."""
    return _HEADER.pack(1 + len(body), VERSION) + body


def refusal(reason: Reason) -> bytes:
    """The frame that tells a dialler why it is refused."""
    return frame(_encode(Refusal(reason)))


class FrameBuffer:
    """Cuts a stream of bytes into the bodies of frames. `limit` bounds a body's bytes and may be changed."""

    __slots__ = ("_data", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> bytes | None:
        """The next body; None if it is incomplete. Raises `FrameTooLarge`, `UnknownVersion`, `BadFrame`."""
        data = self._data
        if len(data) < _HEADER.size:
            return None
        length, version = _HEADER.unpack_from(data)
        if length - 1 > self.limit:
            raise FrameTooLarge(length - 1, self.limit)
        if version != VERSION:
            raise UnknownVersion(version, VERSION)
        if length < 1:
            raise BadFrame("a control frame without a version")
        end = 4 + length
        if len(data) < end:
            return None
        with memoryview(data) as view:
            body = bytes(view[_HEADER.size : end])
        del data[:end]
        return body

    def end(self) -> None:
        """The stream has ended. Raises `TruncatedFrame` if that was inside a frame."""
        if self._data:
            raise TruncatedFrame(f"the stream ended {len(self._data)} bytes into a control frame")


class AuthenticatedSession:
    """The state of an authenticated connection: turns payloads into frames and back. Not thread-safe.

    Sending and receiving share nothing, so one thread may do each.
    """

    __slots__ = ("_buffer", "_receive_key", "_received", "_send_key", "_sent", "peer")

    def __init__(self, peer: str, send_key: bytes, receive_key: bytes, buffer: FrameBuffer) -> None:
        self.peer = peer
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        self._buffer = buffer
        buffer.limit = FRAME_LIMIT + MAC_BYTES

    def seal(self, payload: bytes) -> bytes:
        """The frame that carries `payload`. Raises `FrameTooLarge` and leaves the session unchanged."""
        size = len(payload)
        if size > FRAME_LIMIT:
            raise FrameTooLarge(size, FRAME_LIMIT)
        data = _HEADER.pack(1 + size + MAC_BYTES, VERSION) + payload
        mac = hmac.digest(self._send_key, _NUMBER.pack(self._sent) + data, "sha256")
        self._sent += 1
        return data + mac[:MAC_BYTES]

    def receive(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes, in order. After an error the connection must be dropped.

        Raises `FrameTooLarge`, `UnknownVersion`, `ForgedFrame`, `BadFrame`; what came before the bad frame in
        the same `data` is lost with it.
        """
        buffer = self._buffer
        buffer.feed(data)
        payloads = []
        while (body := buffer.next()) is not None:
            size = len(body) - MAC_BYTES
            if size < 0:
                raise ForgedFrame("a control frame without a MAC")
            header = _HEADER.pack(1 + len(body), VERSION)
            mac = hmac.digest(self._receive_key, _NUMBER.pack(self._received) + header + body[:size], "sha256")
            if not hmac.compare_digest(mac[:MAC_BYTES], body[size:]):
                raise ForgedFrame(f"control frame {self._received} does not verify: forged, altered or replayed")
            self._received += 1
            payloads.append(body[:size])
        return payloads

    def end(self) -> None:
        """The stream has ended. Raises `TruncatedFrame` if that was inside a frame."""
        self._buffer.end()


def _mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    return mac(key, b"control " + label, *parts)


class _ControlHandshake:
    """One side, until `session` is set. If `receive` raises, send the `farewell`, and drop the connection."""

    def __init__(self, key: bytes, job: str, identity: str) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"a job key of {len(key)} bytes is too short: at least {MIN_KEY_BYTES}")
        if not job:
            raise ValueError("the job needs a name")
        if not 0 < len(identity) <= MAX_IDENTITY:
            raise ValueError(f"identity {identity!r} must have 1 to {MAX_IDENTITY} characters")
        self._key, self._job, self._identity = key, job, identity
        self._buffer = FrameBuffer(HANDSHAKE_LIMIT)
        self._hello = self._challenge = b""
        self.farewell = b""
        """What tells an honest dialler why it is refused."""
        self.session: AuthenticatedSession | None = None

    def receive(self, data: bytes) -> bytes:
        """Handle bytes from the other side; returns the bytes to answer with.

        Raises `WrongKey`, `WrongJob`, `UnknownVersion`, `FrameTooLarge`, `BadFrame`; on a dialler also `Busy`. Bytes
        that follow the handshake are kept: `session.receive(b"")` returns them.
        """
        self._buffer.feed(data)
        answer = b""
        while self.session is None and (body := self._buffer.next()) is not None:
            answer += self._take(body)
        return answer

    def _take(self, body: bytes) -> bytes:
        raise NotImplementedError

    def _authenticated(self, peer: str, send_key: bytes, receive_key: bytes) -> None:
        self.session = AuthenticatedSession(peer, send_key, receive_key, self._buffer)


class DiallerHandshake(_ControlHandshake):
    """The handshake of the side that connects. Send `hello`, then what `receive` returns."""

    def __init__(self, key: bytes, job: str, identity: str) -> None:
        super().__init__(key, job, identity)
        nonce = os.urandom(32)
        self._hello = _encode(Hello(nonce, _mac(key, b"job", nonce, job.encode()), identity))

    def hello(self) -> bytes:
        return frame(self._hello)

    def _take(self, body: bytes) -> bytes:
        message = _parse(body)
        if isinstance(message, Refusal):
            raise _refused(message.reason)
        if isinstance(message, Challenge) and not self._challenge:
            self._challenge = body
            return frame(_encode(Proof(_mac(self._key, b"dialler", self._hello, body))))
        if isinstance(message, Welcome) and self._challenge:
            transcript = (self._hello, self._challenge, message.identity.encode())
            if not hmac.compare_digest(_mac(self._key, b"listener", *transcript), message.mac):
                raise WrongKey("the listener could not prove that it has this job's key; nothing was sent to it")
            to_listener, to_dialler = (_mac(self._key, name, *transcript) for name in _DIRECTIONS)
            self._authenticated(message.identity, to_listener, to_dialler)
            return b""
        raise BadFrame(f"{type(message).__name__} out of place in the handshake")


class ListenerHandshake(_ControlHandshake):
    """The handshake of the side that accepts. Send what `receive` returns."""

    _claim: Hello | None = None

    def receive(self, data: bytes) -> bytes:
        try:
            return super().receive(data)
        except ControlError as error:
            self.farewell = refusal(_reason(error))
            raise

    def _take(self, body: bytes) -> bytes:
        message = _parse(body)
        if isinstance(message, Hello) and self._claim is None:
            self._claim, self._hello = message, body
            self._challenge = _encode(Challenge(os.urandom(32)))
            return frame(self._challenge)
        if isinstance(message, Proof) and self._claim is not None:
            if not hmac.compare_digest(_mac(self._key, b"dialler", self._hello, self._challenge), message.mac):
                raise WrongKey(f"{self._claim.identity!r} could not prove that it has this job's key")
            if not hmac.compare_digest(
                _mac(self._key, b"job", self._claim.nonce, self._job.encode()), self._claim.job_tag
            ):
                raise WrongJob(f"{self._claim.identity!r} has the key but is not of job {self._job!r}")
            transcript = (self._hello, self._challenge, self._identity.encode())
            to_listener, to_dialler = (_mac(self._key, name, *transcript) for name in _DIRECTIONS)
            self._authenticated(self._claim.identity, to_dialler, to_listener)
            return frame(_encode(Welcome(self._identity, _mac(self._key, b"listener", *transcript))))
        raise BadFrame(f"{type(message).__name__} out of place in the handshake")


_DIRECTIONS = (b"to listener", b"to dialler")


def _parse(body: bytes) -> Message:
    try:
        return _decoder.decode(body)
    except UNDECODABLE as error:
        raise BadFrame(f"not a handshake message: {error}") from error


def _reason(error: ControlError) -> Reason:
    if isinstance(error, WrongKey):
        return "key"
    if isinstance(error, WrongJob):
        return "job"
    return "version" if isinstance(error, UnknownVersion) else "form"


def _refused(reason: Reason) -> ControlError:
    """The error for a refusal. It proves nothing: any process at that address can send one."""
    if reason == "key":
        return WrongKey("the listener refused this process: the two do not hold the same job key")
    if reason == "job":
        return WrongJob("the listener holds the same key but serves another job; check the job's name")
    if reason == "busy":
        return Busy("the listener has too many unauthenticated connections; try again")
    return BadFrame(f"the listener refused the handshake's {reason}; install the same holdfast on both sides")
