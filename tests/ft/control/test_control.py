"""The control channel: authentication, messages, remote calls and failures."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed
from holdfast.ft.control import frames, rpc
from holdfast.ft.control.errors import (
    BadFrame,
    CallTimeout,
    ConnectionClosed,
    ConnectionLost,
    ControlError,
    ForgedFrame,
    FrameTooLarge,
    RemoteError,
    TruncatedFrame,
    UnknownVersion,
    WrongJob,
    WrongKey,
)
from holdfast.ft.control.frames import AuthenticatedSession, DiallerHandshake, ListenerHandshake
from holdfast.ft.control.rpc import AsyncRpcServer, Handler, RpcConnection, dial_rpc
from holdfast.ft.listen_address import split_address
from support.children import Child
from support.leaks import descriptors
from support.mutations import mutated
from support.rpc_servers import RpcThread, rpc_server_thread
from support.waiting import PATIENCE

KEY = bytes(range(32))
OTHER_KEY = bytes(32)
ME = {"key": KEY, "job": "job", "identity": "me"}
SERVER = {"key": KEY, "job": "job", "identity": "server"}


def sessions() -> tuple[AuthenticatedSession, AuthenticatedSession]:
    """The sessions of a successful handshake: the dialler's, the listener's."""
    dialler, listener = DiallerHandshake(KEY, "job", "me"), ListenerHandshake(KEY, "job", "server")
    welcome = listener.receive(dialler.receive(listener.receive(dialler.hello())))
    assert dialler.receive(welcome) == b""
    assert dialler.session is not None
    assert listener.session is not None
    return dialler.session, listener.session


# The protocol, without I/O.


def test_two_peers_with_the_key_get_messages_whole_in_whatever_pieces_they_come() -> None:
    """And learn it if the last one is not."""
    mine, theirs = sessions()
    assert (mine.peer, theirs.peer) == ("server", "me")
    assert mine.receive(theirs.seal(b"pong")) == [b"pong"]
    sent = [b"", b"a", bytes(1 << 20), b"last"]
    stream = b"".join(mine.seal(payload) for payload in sent)
    received = []
    for start in range(0, len(stream), 99_991):
        received += theirs.receive(stream[start : start + 99_991])
    assert received == sent
    theirs.end()
    assert theirs.receive(mine.seal(b"whole") + mine.seal(b"half")[:-1]) == [b"whole"]
    with pytest.raises(TruncatedFrame):
        theirs.end()


def test_bytes_that_follow_the_handshake_are_kept() -> None:
    dialler, listener = DiallerHandshake(KEY, "job", "me"), ListenerHandshake(KEY, "job", "server")
    welcome = listener.receive(dialler.receive(listener.receive(dialler.hello())))
    assert listener.session is not None
    dialler.receive(welcome + listener.session.seal(b"early"))
    assert dialler.session is not None
    assert dialler.session.receive(b"") == [b"early"]


@pytest.mark.parametrize(
    ("key", "job", "error"), [(OTHER_KEY, "job", WrongKey), (KEY, "another", WrongJob), (OTHER_KEY, "x", WrongKey)]
)
def test_a_peer_with_another_key_or_job_is_refused_and_told_why(
    key: bytes, job: str, error: type[ControlError]
) -> None:
    dialler, listener = DiallerHandshake(key, job, "me"), ListenerHandshake(KEY, "job", "server")
    proof = dialler.receive(listener.receive(dialler.hello()))
    with pytest.raises(error, match="me"):
        listener.receive(proof)
    assert listener.session is None
    with pytest.raises(error):
        dialler.receive(listener.farewell)


def test_a_dialler_refuses_a_listener_without_the_key() -> None:
    dialler = DiallerHandshake(KEY, "job", "me")
    impostor = ListenerHandshake(OTHER_KEY, "job", "server")
    dialler.receive(impostor.receive(dialler.hello()))
    with pytest.raises(WrongKey):
        dialler.receive(frames.frame(frames._encode(frames.Welcome("server", bytes(32)))))
    assert dialler.session is None


def test_a_recorded_handshake_shows_neither_key_nor_job_name_and_opens_no_second_session() -> None:
    dialler, listener = DiallerHandshake(KEY, "secret job", "me"), ListenerHandshake(KEY, "secret job", "server")
    said = [dialler.hello()]
    for side in (listener, dialler, listener):
        said.append(side.receive(said[-1]))
    assert listener.session is not None and not any(KEY in each or b"secret" in each for each in said)
    again = ListenerHandshake(KEY, "secret job", "server")
    again.receive(said[0])
    with pytest.raises(WrongKey):
        again.receive(said[2])


def test_a_frame_verifies_in_order_in_its_direction_and_on_its_connection() -> None:
    """And once: `test_a_tampered_stream_gives_a_prefix...` replays frames."""
    mine, theirs = sessions()
    first, second = mine.seal(b"first"), mine.seal(b"second")
    for wrong in (
        lambda: sessions()[1].receive(first),
        lambda: mine.receive(first),
        lambda: theirs.receive(second),
    ):
        with pytest.raises(ForgedFrame):
            wrong()


def test_a_frame_over_the_limit_is_refused_before_it_is_sent_or_received() -> None:
    mine, theirs = sessions()
    with pytest.raises(FrameTooLarge, match="1048577"):
        mine.seal(bytes((1 << 20) + 1))
    assert theirs.receive(mine.seal(bytes(1 << 20))) == [bytes(1 << 20)], "and the session goes on"
    with pytest.raises(FrameTooLarge):
        theirs.receive((1 << 31).to_bytes(4, "big") + b"\1")
    with pytest.raises(FrameTooLarge):
        ListenerHandshake(KEY, "job", "server").receive(b"GET / HTTP/1.1\r\n\r\n")


def test_another_version_of_the_protocol_is_named_and_an_identity_that_is_no_text_refused() -> None:
    mine, theirs = sessions()
    frame = bytearray(mine.seal(b"hello"))
    frame[4] = 9
    with pytest.raises(UnknownVersion) as found:
        theirs.receive(bytes(frame))
    assert (found.value.theirs, found.value.ours) == (9, frames.VERSION)
    hello = DiallerHandshake(KEY, "job", "me").hello()
    for changed, error in (
        (hello[:4] + b"\x09" + hello[5:], UnknownVersion),
        (hello.replace(b"me", b"\xff\xff"), BadFrame),
    ):
        with pytest.raises(error):
            ListenerHandshake(KEY, "job", "server").receive(changed)


@pytest.mark.parametrize(
    "arguments", [(b"short", "job", "me"), (KEY, "", "me"), (KEY, "job", ""), (KEY, "job", "x" * 300)]
)
def test_arguments_that_cannot_work_are_refused_at_once(arguments: tuple[bytes, str, str]) -> None:
    for side in (DiallerHandshake, ListenerHandshake):
        with pytest.raises(ValueError):
            side(*arguments)


# Fuzzing: any input gives a typed error or nothing, and never a message that was not sent.


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(borders):
        yield data[start:end]


framed = st.binary(max_size=200).map(frames.frame)


@given(
    st.booleans(),
    st.booleans(),
    st.one_of(st.binary(max_size=300), st.lists(framed, max_size=3).map(b"".join)),
    st.lists(st.integers(0), max_size=5),
)
def test_no_bytes_open_a_session_without_the_key(dials: bool, begun: bool, data: bytes, cuts: list[int]) -> None:
    """Sent to a side at once, or once it has received a valid message."""
    dialler, listener = DiallerHandshake(KEY, "job", "me"), ListenerHandshake(KEY, "job", "server")
    if begun:
        challenge = listener.receive(dialler.hello())
        if dials:
            dialler.receive(challenge)
    handshake = dialler if dials else listener
    with contextlib.suppress(ControlError):
        for piece in pieces(data, cuts):
            handshake.receive(piece)
    assert handshake.session is None


@given(
    st.lists(st.binary(max_size=50), min_size=1, max_size=5),
    st.sampled_from(["flip", "cut", "remove", "insert", "replay", "swap", "drop"]),
    st.integers(0),
    st.integers(0),
    st.lists(st.integers(0), max_size=5),
)
def test_a_tampered_stream_gives_a_prefix_of_what_was_sent_and_then_an_error(
    payloads: list[bytes], kind: str, where: int, what: int, cuts: list[int]
) -> None:
    mine, theirs = sessions()
    sealed = [mine.seal(payload) for payload in payloads]
    stream = b"".join(mutated(sealed, kind, where, what))
    received: list[bytes] = []
    failed = False
    try:
        for piece in pieces(stream, cuts):
            received += theirs.receive(piece)
        theirs.end()
    except ControlError:
        failed = True
    assert received == payloads[: len(received)]
    assert failed or stream == b"".join(sealed)[: len(stream)]


@given(st.integers(0, 3), st.integers(0), st.integers(0, 7))
def test_one_wrong_bit_anywhere_in_the_handshake_opens_no_pair_of_sessions(step: int, where: int, bit: int) -> None:
    dialler, listener = DiallerHandshake(KEY, "job", "me"), ListenerHandshake(KEY, "job", "server")
    message = dialler.hello()
    with contextlib.suppress(ControlError):
        for turn, receiver in enumerate((listener, dialler, listener, dialler)):
            if turn == step:
                changed = bytearray(message)
                changed[where % len(changed)] ^= 1 << bit
                message = bytes(changed)
            message = receiver.receive(message)
    assert dialler.session is None or listener.session is None


# Connections.


async def sleepy(peer: str, body: bytes) -> bytes:
    await asyncio.sleep(float(body))
    return body


def broken(peer: str, body: bytes) -> bytes:
    raise KeyError("the answer")


HANDLERS: dict[str, Handler] = {
    "echo": lambda peer, body: body,
    "who": lambda peer, body: peer.encode(),
    "sleep": sleepy,
    "broken": broken,
    "nonsense": lambda peer, body: "no bytes",  # type: ignore[dict-item,return-value]
    "large": lambda peer, body: bytes(2 << 20),
}


@contextlib.asynccontextmanager
async def serving(handlers: dict[str, Handler] | None = None, **options: Any) -> AsyncIterator[AsyncRpcServer]:
    server = AsyncRpcServer(**SERVER, handlers=handlers or HANDLERS, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def test_a_connection_to_a_peer_that_never_reads_is_closed() -> None:
    connected: asyncio.Queue[RpcConnection] = asyncio.Queue()
    async with serving(on_connect=connected.put_nowait) as server:
        mine = await dial_rpc(server.address, **ME)
        (await connected.get())._transport.pause_reading()
        with pytest.raises(ConnectionLost, match="does not read"):
            for _ in range(100):
                mine.notify("echo", bytes(1_000_000))


@pytest.mark.parametrize(("wrong", "error"), [({"key": OTHER_KEY}, WrongKey), ({"job": "other"}, WrongJob)])
async def test_a_dialler_with_a_wrong_key_or_job_gets_the_error_promptly(
    wrong: dict[str, Any], error: type[ControlError]
) -> None:
    async with serving() as server:
        started = time.monotonic()
        with pytest.raises(error):
            await dial_rpc(server.address, **(ME | wrong), timeout=2 * PATIENCE)
        assert time.monotonic() - started < PATIENCE
        assert not server.connections


async def test_dialling_a_port_without_a_listener_or_that_never_answers_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(CallTimeout):
            await dial_rpc(address, **ME, timeout=0.2)
    started = time.monotonic()
    with pytest.raises(ConnectionLost, match="refused"):
        await dial_rpc(address, **ME, timeout=2 * PATIENCE)
    assert time.monotonic() - started < PATIENCE


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\2\1\0", b""])
async def test_dialling_another_protocol_raises_a_typed_error(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises((BadFrame, ConnectionLost)):
            await dial_rpc(f"{host}:{port}", **ME, timeout=5.0)


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "host:-1"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)


async def test_a_silent_dialler_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "HANDSHAKE_SECONDS", 0.2)
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*split_address(server.address))
        writer.write(b"\0\0")
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()


# Remote calls.


async def test_a_failed_handler_raises_at_the_caller_and_the_connection_stays_open() -> None:
    async with serving() as server:
        mine = await dial_rpc(server.address, **ME)
        for method, kind in (("broken", "KeyError"), ("none such", "LookupError"), ("nonsense", "TypeError")):
            with pytest.raises(RemoteError) as failed:
                await mine.call(method)
            assert (failed.value.peer, failed.value.method, failed.value.kind) == ("server", method, kind)
        with pytest.raises(RemoteError, match="FrameTooLarge"):
            await mine.call("large")
        with pytest.raises(FrameTooLarge):
            await mine.call("echo", bytes(2 << 20))
        assert await mine.call("echo", b"still here") == b"still here"


class Forever:
    """A handler that never answers, and notes when it is called and cancelled."""

    def __init__(self) -> None:
        self.working, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, peer: str, body: bytes) -> bytes:
        self.working.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.cancelled.set()
        return b""


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_call_that_ends_at_its_timeout_or_is_cancelled_cancels_its_handler(cancelled: bool) -> None:
    forever = Forever()
    async with serving(HANDLERS | {"forever": forever}) as server:
        mine = await dial_rpc(server.address, **ME)
        started = time.monotonic()
        call = asyncio.ensure_future(mine.call("forever", timeout=60.0 if cancelled else 0.2))
        if cancelled:
            await asyncio.wait_for(forever.working.wait(), PATIENCE)
            call.cancel()
        else:
            with pytest.raises(OpTimeout, match="forever"):
                await call
            assert 0.2 <= time.monotonic() - started < PATIENCE
        await asyncio.wait_for(forever.cancelled.wait(), PATIENCE)
        assert await mine.call("echo", b"next") == b"next"


async def test_the_server_learns_that_a_client_is_gone_and_cancels_its_work(start: Callable[..., Child]) -> None:
    lost: list[tuple[RpcConnection, ControlError]] = []
    forever, gone = Forever(), asyncio.Event()

    def ended(connection: RpcConnection, reason: ControlError) -> None:
        lost.append((connection, reason))
        gone.set()

    def body(pipe: Pipe, address: str) -> None:
        with RpcThread(address, **ME) as client:
            client.call("forever")

    async with serving({"forever": forever}, on_connect=lambda each: each.on_lost(ended)) as server:
        child = start(body, server.address)
        await asyncio.wait_for(forever.working.wait(), PATIENCE)
        child.kill()
        await asyncio.wait_for(gone.wait(), 5.0)
        await asyncio.wait_for(forever.cancelled.wait(), 5.0)
        assert not server.connections
    assert [(connection.peer, connection.lost) for connection, _ in lost] == [("me", lost[0][1])]


@pytest.mark.parametrize("closer", ["caller", "server"])
async def test_closing_either_side_of_a_connection_ends_calls_and_notices(closer: str) -> None:
    """Calls in flight do not wait for each other."""
    async with serving() as server:
        mine = await dial_rpc(server.address, **ME)
        lost: list[ControlError] = []
        mine.on_lost(lambda connection, reason: lost.append(reason))
        waiting = await waiting_calls(mine, 3)
        for _ in range(2):
            mine.close() if closer == "caller" else await server.close()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in (*errors, *lost)] == [ConnectionClosed] * 4
        with pytest.raises(ConnectionLost, match="closed on this side" if closer == "caller" else "closed it or died"):
            await mine.call("echo")
        with pytest.raises(HoldfastError):
            mine.notify("echo")
        await mine.wait_closed()


async def waiting_calls(connection: RpcConnection, count: int) -> list[asyncio.Task[bytes]]:
    """Calls that are never answered."""
    calls = [asyncio.create_task(connection.call("sleep", b"60")) for _ in range(count)]
    await asyncio.sleep(0)
    await connection.call("sleep", b"0")  # it comes after the others, whose handlers run, and does not wait for them
    return calls


def serve_until_killed(pipe: Pipe) -> None:
    """Serve, and fork a process that sleeps when the test asks for it."""
    with rpc_server_thread(**SERVER, handlers=HANDLERS) as server:
        pipe.send(server.address)
        pipe.recv()
        worker = os.fork()
        if worker == 0:
            time.sleep(PATIENCE)
            os._exit(0)
        pipe.send(worker)
        pipe.recv()


async def test_calls_that_wait_on_a_server_that_is_killed_end_at_once(start: Callable[..., Child]) -> None:
    """Children of its own do not hide its death."""
    child = start(serve_until_killed)
    address = child.hear()
    mine = await dial_rpc(address, **ME)
    waiting = await waiting_calls(mine, 3)
    child.tell("fork now")
    worker = child.hear()
    try:
        child.kill()
        errors = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE)
        assert all(isinstance(error, ConnectionLost) and isinstance(error, PeerFailed) for error in errors)
        for use in (mine.call("echo"), dial_rpc(address, **ME)):
            with pytest.raises(ConnectionLost):
                await use
    finally:
        os.kill(worker, 9)


def test_a_server_that_is_stopped_delays_no_call_beyond_its_timeout(start: Callable[..., Child]) -> None:
    child = start(serve_until_killed)
    with RpcThread(child.hear(), **ME) as client:
        child.stop()
        with pytest.raises(CallTimeout, match="server"):
            client.call("echo", timeout=0.2)
        child.resume()
        assert client.call("echo", b"awake") == b"awake"


async def test_a_malformed_message_or_one_changed_on_the_way_drops_only_the_connection_that_it_came_over() -> None:
    connected: asyncio.Queue[RpcConnection] = asyncio.Queue()
    async with serving(on_connect=connected.put_nowait) as server:
        mine = await dial_rpc(server.address, **ME)
        await connected.get()
        for payload in (b"changed", b"", b"\x93\0\0\0", b"\x94\0\1\2\3", b"\x94\0\1\xa1\xff\xc4\0", b"{}", bytes(100)):
            fuzzer = await dial_rpc(server.address, **(ME | {"identity": "fuzzer"}))
            theirs, sealed = await connected.get(), bytearray(fuzzer._session.seal(payload))
            sealed[-1] ^= payload == b"changed"
            fuzzer._transport.write(bytes(sealed))
            with pytest.raises(ConnectionLost):
                await fuzzer.call("echo", timeout=5.0)
            assert type(theirs.lost) is (ForgedFrame if payload == b"changed" else BadFrame)
            assert await mine.call("echo", b"unharmed") == b"unharmed"


async def test_a_server_that_cannot_start_leaves_no_socket_and_no_address() -> None:
    async with serving() as running:
        host, port = split_address(running.address)
        before = descriptors()
        refused = AsyncRpcServer(**SERVER, handlers={})
        with pytest.raises(OSError, match="in use"):
            await refused.start(host, port)
        assert refused.address == ""
        assert descriptors() == before
        await refused.close()
        mine = await dial_rpc(running.address, **ME)
        assert await mine.call("echo", b"still served") == b"still served"
        mine.close()
        await mine.wait_closed()


async def test_either_side_of_a_connection_may_call_the_other() -> None:
    connected: asyncio.Queue[RpcConnection] = asyncio.Queue()
    noted: asyncio.Queue[bytes] = asyncio.Queue()

    def note(peer: str, body: bytes) -> bytes:
        noted.put_nowait(peer.encode() + b": " + body)
        return b""

    async with serving(on_connect=connected.put_nowait) as server:
        mine = await dial_rpc(server.address, **ME, handlers={"add": lambda peer, body: body + b"!", "note": note})
        theirs = await connected.get()
        assert (mine.peer, await mine.call("who")) == ("server", b"me")
        for body in (b"up", bytes(1_000_000)):
            assert await mine.call("echo", body) == body
        assert await theirs.call("add", b"down") == b"down!"
        theirs.notify("note", b"revoked")
        assert await noted.get() == b"server: revoked"
        assert server.connections == {theirs}
        mine.close()
        await mine.wait_closed()
