"""Rendezvous: foreign servers and leftovers at the meeting place, torchrun, and processes without the job's key."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from holdfast import comms
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.comms.memory_plane import Handle
from holdfast.comms.rendezvous import meeting_place as places
from holdfast.comms.rendezvous import meeting_store, tcp
from holdfast.comms.rendezvous.handles import parse_members
from holdfast.comms.rendezvous.meeting_store import MeetingStore, StoreSilent, fetch
from holdfast.comms.rendezvous.offer_exchange import Offer, decode_offer
from holdfast.comms.system.keys import Seal, create_key
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, this_process
from holdfast.ft.control.rpc import AsyncRpcServer
from holdfast.ft.listen_address import check_interface, check_ours
from holdfast.ft.membership.view import View
from support.children import Child
from support.comms.meeting import in_threads, total
from support.comms.ranks import on_ranks
from support.programs.forked_programs import run_forked, run_python
from support.waiting import PATIENCE, eventually


@pytest.mark.parametrize("backend", ["inproc", "gloo"])
def test_more_ranks_ask_the_store_hardly_more_often_each(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo itself asks twice for each peer. The polls of a rank that waits do not count."""
    asked, call = list[object](), MeetingStore._call

    def counted(store: MeetingStore, ask: Callable[[], Any]) -> Any:
        if "check" not in ask.__qualname__:
            asked.append(ask)
        return call(store, ask)

    monkeypatch.setattr(MeetingStore, "_call", counted)
    each = {}
    for size in (2, 8):
        store = dist.HashStore()
        asked.clear()
        connect = partial(comms.connect, backend, size=size, rendezvous=store)
        results = in_threads(size, lambda rank, connect=connect: total(connect(rank=rank)))
        assert results == [size * (size + 1) / 2] * size
        each[size] = len(asked) / size
    # One more for each peer were six more; a busy machine makes ranks read twice what others have just written.
    assert each[8] - each[2] <= (15 if backend == "gloo" else 3), each


@contextlib.contextmanager
def listener(answer: bytes) -> Iterator[int]:
    """A foreign server at a port: it never answers, or sends every client the same bytes."""
    over = threading.Event()

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.sendall(answer)
            over.wait()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            yield int(server.server_address[1])
        finally:
            over.set()
            server.shutdown()


@pytest.mark.parametrize("answer", [b"", b"220 mail.example ESMTP\r\n", b"\0" * 64])
@pytest.mark.parametrize("rank", [0, 1])
def test_another_server_at_the_port_is_an_error_within_the_timeout(answer: bytes, rank: int) -> None:
    with listener(answer) as port:
        began = time.monotonic()
        with pytest.raises(comms.HoldfastError, match=rf"127\.0\.0\.1:{port}"):
            comms.connect("inproc", rank=rank, size=2, rendezvous=f"tcp://127.0.0.1:{port}", timeout=1.0)
        assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize(
    ("place", "said"),
    [("file:///nowhere/meeting", "nowhere"), ("tcp://192.0.2.1:29500", "name an address of its machine")],
)
def test_a_place_that_cannot_be_made_here_is_an_error_at_once(place: str, said: str) -> None:
    with pytest.raises(comms.HoldfastError, match=said):
        comms.connect("inproc", rank=0, size=2, rendezvous=place, timeout=300.0)


def test_a_store_whose_process_is_stopped_is_a_timeout_and_a_lost_one_an_error_at_once(
    port: int, start: Callable[..., Child]
) -> None:
    def serve(pipe: Connection) -> None:
        store = tcp.serve("127.0.0.1", port, 30.0)
        pipe.send("serving")
        pipe.recv()
        del store

    server = start(serve)
    server.hear()
    client = tcp.dial("127.0.0.1", port, 10.0)
    server.stop()
    began = time.monotonic()
    with pytest.raises(comms.OpTimeout):
        comms.connect("inproc", rank=1, size=2, rendezvous=client, timeout=1.0)
    assert time.monotonic() - began < PATIENCE
    server.kill()
    with pytest.raises(comms.PeerFailed, match="gone"):
        comms.connect("inproc", rank=1, size=2, rendezvous=client, timeout=2 * PATIENCE)


def test_a_socket_that_is_closed_while_another_one_connects_ends_for_its_peer() -> None:
    def dial_in_vain() -> None:
        with pytest.raises(StoreSilent):
            tcp.dial("127.0.0.1", silent.getsockname()[1], 5.0)

    own, other = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as silent, own, other:
        connecting = threading.Thread(target=dial_in_vain)
        connecting.start()
        assert select.select([silent], [], [], PATIENCE)[0], "it connects"
        own.close()
        assert select.select([other], [], [], PATIENCE)[0] and other.recv(1) == b""
        assert connecting.is_alive(), "not only when the attempt is over"
        connecting.join(PATIENCE)


@on_ranks(2, "shm")
def test_ranks_may_meet_again_and_again_at_a_port_that_rank_0_serves_anew(comm: comms.Communicator, port: int) -> None:
    """Rank 1 may arrive before rank 0 has left the previous meeting and closed its store."""
    for _ in range(12):
        made = comms.connect("shm", rank=comm.rank, size=2, rendezvous=f"tcp://127.0.0.1:{port}")
        assert total(made) == 3.0


@pytest.mark.parametrize("first", ["torch", "holdfast"])
def test_torch_and_holdfast_share_the_store_at_the_masters_port(
    port: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(port))
    if first == "torch":
        dist.init_process_group("gloo")
        try:
            assert total(comms.connect("inproc")) == 1.0
        finally:
            dist.destroy_process_group()
    else:
        with comms.connect("inproc") as comm:
            dist.init_process_group("gloo")
            dist.destroy_process_group()
            comm.barrier()


def test_what_a_killed_job_left_in_a_file_is_named(tmp_path: Path, start: Callable[..., Child]) -> None:
    meeting = tmp_path / "meeting"

    def connect(rank: int) -> comms.Communicator:
        return comms.connect("shm", rank=rank, size=2, rendezvous=f"file://{meeting}", timeout=20.0)

    killed = start(lambda pipe: connect(0))
    eventually(lambda: meeting.exists() and b"offer/0" in (there := meeting.read_bytes()) and places.is_whole(there))
    killed.kill()
    with pytest.raises(comms.Mismatch, match=rf"pid {killed.pid}\), which has ended.*left over.*rm {meeting}"):
        connect(0)
    with pytest.raises(comms.PeerFailed, match="left over from an earlier run") as caught:
        connect(1)
    assert caught.value.ranks == (0,)


@given(entries=st.dictionaries(st.text(max_size=3), st.binary(max_size=3), max_size=3), data=st.data())
def test_a_file_that_a_killed_process_left_amid_an_entry_is_refused(
    entries: dict[str, bytes], data: st.DataObject
) -> None:
    """Its last entry is cut off anywhere; torch's store would read on for ever."""
    texts = [text for key, value in entries.items() for text in (key.encode(), value)]
    whole = b"".join(len(text).to_bytes(4, sys.byteorder) + text for text in texts)
    ends = {sum(4 + len(text) for text in texts[:count]) for count in range(0, len(texts) + 1, 2)}
    cut = data.draw(st.integers(0, len(whole)))
    assert places.is_whole(whole[:cut]) == (cut in ends)


def test_a_file_that_is_cut_off_is_named_and_one_that_a_process_goes_on_writing_is_not_waited_for(
    tmp_path: Path,
) -> None:
    where = f"file://{tmp_path}/meeting"
    (tmp_path / "meeting").write_bytes((8).to_bytes(4, sys.byteorder) + b"refcount" + b"\1")
    with pytest.raises(comms.Mismatch, match=rf"left over from an earlier run; rm {tmp_path}/meeting"):
        comms.connect("shm", rank=0, size=1, rendezvous=where)
    (tmp_path / "meeting").unlink()
    with (tmp_path / "meeting").open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(comms.HoldfastError, match=r"has been writing to it for 0\.1 s"):
            places.meet(where, 0, 1, 0.1)


def test_threads_of_one_process_meet_in_a_file(tmp_path: Path, start: Callable[..., Child]) -> None:
    """A FileStore takes the lock of its file with the GIL: no thread may wait for the GIL with that lock."""

    def ranks(rank: int) -> set[int]:
        return {places.meet(f"file://{tmp_path}/{number}", rank, 3, 60.0).rank for number in range(100)}

    assert start(lambda pipe: pipe.send(in_threads(3, ranks))).hear() == [{0}, {1}, {2}]


WORKER = """
import os, torch, torch.distributed as dist
from holdfast import comms
import holdfast.comms.torchdist

with comms.connect("shm", timeout=60.0) as comm:
    dist.init_process_group("holdfast")
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if comm.rank == 1 and restart == 0:
        os._exit(3)
    tensor = torch.ones(1)
    comm.all_reduce(tensor)
    dist.all_reduce(tensor)
    print(f"restart {restart} ranks {comm.rank} {dist.get_rank()} sum {tensor.item():g}", flush=True)
"""


def test_a_store_may_be_shared_by_several_runs_of_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The replica groups of torchft are such runs. In other stores, a run must not find what an earlier one left."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert places.meet(places.SharedByRuns("groups", dist.HashStore()), 0, 1, 1.0).scope == ""
    assert places.meet(dist.HashStore(), 0, 1, 1.0).scope == "a.1/"
    assert places.meet(f"file://{tmp_path / 'place'}", 0, 1, 1.0).scope == "a.1/"


@pytest.mark.thorough
def test_ranks_that_torchrun_restarts_meet_again(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    run = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1")
    meet = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.1")
    printed = run_python(*run, *meet, script)
    for rank in range(2):
        assert f"restart 1 ranks {rank} {rank} sum 4" in printed


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key of a job to which this process belongs."""
    create_key(tmp_path / "key")
    monkeypatch.setenv("HOLDFAST_KEY_FILE", str(tmp_path / "key"))
    return tmp_path / "key"


def forged(**changes: Any) -> bytes:
    """A well-formed offer from a process without the key."""
    fields = {"nonce": "f" * 32, "peer": this_process(), "size": 2, "preference": ["inproc"], "unavailable": {}}
    return Offer(**{**fields, "check": False, **changes}).encode()


def test_the_store_listens_at_the_named_interface_only(port: int) -> None:
    with comms.connect("inproc", rank=0, size=1, rendezvous=f"tcp://127.0.0.1:{port}"):
        tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
        lines = [line.split() for line in tables.splitlines()]
        listening = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="another name server for a process: run as root")
def test_no_name_server_is_asked_who_an_address_is(tmp_path: Path) -> None:
    """torch would ask, to log the name, and wait for 5 s where the name server is silent."""
    address = f"127.53.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    (tmp_path / "resolv.conf").write_text(f"nameserver {address}\n")
    store = """
import ctypes, subprocess, sys
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
for arguments in (["--make-rprivate", "/"], ["--bind", sys.argv[1], "/etc/resolv.conf"]):
    subprocess.run(["mount", *arguments], check=True)
from holdfast.comms.rendezvous import tcp
store = tcp.serve("127.0.0.1", 0, 30.0)
tcp.dial("127.0.0.1", store.port, 30.0).set("key", "value")
"""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as name_server:
        name_server.bind((address, 53))
        name_server.setblocking(False)
        ended = run_forked(store, ["store.py", str(tmp_path / "resolv.conf")])
        assert (ended.returncode, ended.stderr) == (0, "")
        with pytest.raises(BlockingIOError):
            name_server.recv(512)


def test_a_machine_whose_own_name_means_loopback_can_be_reached_by_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost.localdomain")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    assert places._interface("localhost.localdomain") == "0.0.0.0"
    assert "listens on all interfaces" in caplog.text
    assert places._interface("localhost") == "localhost"
    assert places._interface("127.0.0.1") == "127.0.0.1"


def test_a_stranger_cannot_take_a_rank_of_a_job_with_a_key(key_file: Path) -> None:
    """Its offers are overwritten, and refused where they are not, as are those that were sealed for another meeting."""
    store = dist.HashStore()
    store.set("holdfast/default/0/offer/1", forged())  # type: ignore[arg-type]
    store.set("holdfast/default/0/offer/0", "x" * (1 << 20))
    assert in_threads(2, lambda r: total(comms.connect("inproc", rank=r, size=2, rendezvous=store))) == [3.0, 3.0]
    repeated = store.get("holdfast/default/0/offer/1")
    for number, offer, said in ((1, forged(), "written without this job's key"), (2, repeated, "does not verify")):
        store.set(f"holdfast/default/{number}/offer/1", offer)  # type: ignore[arg-type]
        with pytest.raises(comms.CorruptData, match=said):
            comms.connect("inproc", rank=0, size=2, rendezvous=store, timeout=10.0)


def test_a_rank_without_the_key_learns_that_the_others_have_one(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    with pytest.raises(comms.OpTimeout):
        comms.connect("inproc", rank=0, size=2, rendezvous=store, timeout=0.3)
    store.delete_key("holdfast/default/0/left")
    monkeypatch.delenv("HOLDFAST_KEY_FILE")
    with pytest.raises(comms.Mismatch, match="same HOLDFAST_KEY_FILE"):
        comms.connect("inproc", rank=1, size=2, rendezvous=store, timeout=10.0)


def test_addresses_are_bound_to_the_offers_of_their_meeting() -> None:
    seal = Seal(b"k" * 32, b"meeting 0")
    ours = seal.bound_to(b"offers")
    assert ours.unwrap("board", ours.wrap("board", b"here")) == b"here"
    for other in (seal, seal.bound_to(b"other offers")):
        with pytest.raises(comms.CorruptData):
            ours.unwrap("board", other.wrap("board", b"here"))


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(0, 10_000), st.integers(1, 255))
def test_every_change_of_a_sealed_value_is_detected(name: bytes, value: bytes, where: int, flip: int) -> None:
    seal = Seal(b"k" * 32, b"meeting 0")
    sealed = bytearray(seal.wrap(name.hex(), value))
    assert seal.unwrap(name.hex(), bytes(sealed)) == value
    sealed[where % len(sealed)] ^= flip
    for wrong in (bytes(sealed), bytes(sealed)[: where % len(sealed)]):
        with pytest.raises(comms.CorruptData):
            seal.unwrap(name.hex(), wrong)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
json_values = scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.text(max_size=8), scalars, max_size=4)


@given(
    st.binary(max_size=300)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.tuples(
        st.sampled_from(["nonce", "peer", "size", "preference", "unavailable", "check", "more"]), json_values
    ).map(lambda change: json.dumps({**json.loads(forged()), change[0]: change[1]}).encode())
    | st.builds(
        lambda pid, started: forged(peer=Peer("host", pid, started)),
        st.integers(-(2**63), 2**64 - 1),
        st.integers(-5, 5),
    )
)
def test_a_forged_offer_is_a_typed_error_or_a_valid_offer(data: bytes) -> None:
    try:
        offer = decode_offer("offer/1", data)
    except comms.CorruptData as error:
        assert "offer/1" in str(error)
    else:
        assert 0 < offer.peer.pid < 1 << 31 and offer.size > 0
        is_gone(offer.peer)


DEEP_JSON = b'{"x":' + b"[" * 2000 + b"]" * 2000 + b"}"
DEEP_MSGPACK = b"\x81\xa1x" + b"\x91" * 2000 + b"\xc0"


@pytest.mark.parametrize(
    ("decode", "error", "said"),
    [
        (lambda: meeting_store.decode("link", DEEP_JSON, Peer), comms.CorruptData, "recursion"),
        (lambda: parse_members([DEEP_JSON.decode()], DEEP_JSON.decode()), ValueError, "recursion"),
        (lambda: Handle.decode(DEEP_MSGPACK), comms.CorruptData, "recursion"),
        (lambda: View.decode(DEEP_MSGPACK), comms.CorruptData, "recursion"),
        (lambda: decode_offer("offer/1", forged() + b" " * 70_000), comms.CorruptData, "more than 65536"),
    ],
    ids=["at the rendezvous", "handle of a process", "handle of memory", "view", "offer"],
)
def test_bytes_that_nest_too_deeply_or_are_too_many_are_a_typed_error(
    decode: Callable[[], object], error: type[Exception], said: str
) -> None:
    """msgspec raises RecursionError for them, also in fields that it skips."""
    with pytest.raises(error, match=said):
        decode()


class Garbage(dist.Store):
    """A store that returns the same malformed value for every key."""

    def __init__(self, value: bytes) -> None:
        super().__init__()
        self.value = value

    set = wait = lambda self, *_: None
    check = lambda self, keys: True  # noqa: E731

    def get(self, key: str) -> bytes:
        return self.value


@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"{}", b"[1]", b"x" * (1 << 17), b"0" * 64])
@pytest.mark.parametrize("name", ["inproc", "shm", "gloo", "ucx"])
def test_a_malformed_address_is_a_typed_error(name: str, value: bytes) -> None:
    members = KnownMembers(rank=1, peers=[this_process()] * 2, store=Garbage(value), epoch=0, name=uuid4().hex)
    with pytest.raises(comms.HoldfastError):
        connect_members(name, members, timeout=1.0)


@pytest.mark.parametrize(
    ("host", "kind", "words"),
    [
        (None, TypeError, "must be a name or an address as text, not NoneType"),
        (5, TypeError, "not int"),
        *((host, ValueError, "means every interface") for host in ("", "0.0.0.0", "::", "::ffff:0.0.0.0")),
        *(
            (host, ValueError, "neither a name nor an address")
            for host in ("0x0", "127.0.0.1:29500", "my host", "a..b", "-a", "a" * 64, "node\0")
        ),
        *((host, ValueError, "the address of many") for host in ("224.0.0.1", "255.255.255.255")),
    ],
)
def test_a_host_that_is_not_one_interface_is_refused(host: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        check_ours(host)
    listener = AsyncRpcServer(key=b"k" * 32, job="j", identity="i", handlers={})
    with pytest.raises(kind, match=words):
        asyncio.run(listener.start(host, 0))


def test_a_host_that_is_elsewhere_unknown_everywhere_or_found_too_late_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(ValueError, match=r"is none of this machine \(192.0.2.1: .*\); name the interface"):
        check_ours("192.0.2.1")  # reserved for documentation (RFC 5737): no machine has it
    answered = threading.Event()
    everywhere = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("0.0.0.0", 0))]
    lookups: list[tuple[Callable[..., Any], float, str]] = [
        (nobody, PATIENCE, "host 'node17' cannot be looked up: .*Name or service not known"),
        (lambda *_, **__: everywhere, PATIENCE, "means every interface"),
        (lambda *_, **__: answered.wait(20.0), 0.05, "cannot be looked up: no answer within 0.05 s"),
    ]
    try:
        for lookup, seconds, words in lookups:
            monkeypatch.setattr(socket, "getaddrinfo", lookup)
            monkeypatch.setattr("holdfast.ft.listen_address.LOOKUP_SECONDS", seconds)
            with pytest.raises(ValueError, match=words):
                check_ours("node17")
    finally:
        answered.set()


@given(st.text(max_size=300))
def test_any_text_is_accepted_or_refused_with_a_hint(host: str) -> None:
    try:
        assert check_interface(host) == host
    except ValueError as error:
        assert "name the" in str(error)


class ToldOfKeys(dist.Store):
    """A store that says when a key is set, as that of a session does; to check one asks another process."""

    def __init__(self, set_after: int) -> None:
        super().__init__()
        self.waits, self._set_after = list[float](), set_after

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.waits.append(timeout.total_seconds())
        if len(self.waits) <= self._set_after:
            raise TimeoutError

    def check(self, keys: list[str]) -> bool:
        raise AssertionError("it is not polled")

    def get(self, key: str) -> bytes:
        return key.encode()


def test_a_store_that_says_when_a_key_is_set_is_not_polled() -> None:
    store = ToldOfKeys(set_after=3)
    assert fetch(store, "key", time.monotonic() + 60.0) == b"key"
    assert len(store.waits) == 4 and max(store.waits) <= 0.05, "between two waits it looks at the others"
    with pytest.raises(TimeoutError, match="has set key"):
        fetch(ToldOfKeys(set_after=1000), "key", time.monotonic() - 1.0)


def test_a_store_of_torch_is_polled() -> None:
    """A wait of a TCPStore that times out asks the DNS about its address."""
    store = dist.HashStore()
    setter = threading.Timer(0.1, store.set, ("key", "value"))
    setter.start()
    assert fetch(store, "key", time.monotonic() + 60.0) == b"value"
    setter.join()
    with pytest.raises(TimeoutError, match="has set other"):
        fetch(store, "other", time.monotonic() + 0.1)
