"""The ucx backend: transports by name, deaths that UCX does not report, one-sided access over both transports."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import comms
from holdfast.backends.common.region_table import WRITER_SECONDS
from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.endpoints import Connections
from holdfast.backends.ucx.memory_plane import UcxPlane
from holdfast.backends.ucx.onesided import UcxChannel
from holdfast.backends.ucx.worker import ProgressThread, Transports, UcxWorker
from holdfast.comms import Communicator, CorruptData, HoldfastError, OpTimeout, PeerFailed, RegionGone, Revoked
from holdfast.comms.memory_plane import Handle
from holdfast.comms.onesided import requests
from holdfast.comms.onesided.requests import Exposed, Head
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.comms.tensors.packing import span
from holdfast.harness import LocalCluster
from support.children import Start
from support.comms.ranks import on_ranks, on_ranks_of, shared_ranks
from support.programs.forked_programs import run_holdfast
from support.waiting import PATIENCE, PROGRAM_SECONDS, eventually

SHARED_MEMORY, TCP = "posix,cma,self", "tcp,self"
AS_IN_HARDWARE = "posix,cma,ib,self"
"""The settings of a network that seems to do one-sided access itself; UCX has no such device here, and copies."""
ONE_SIDED = (
    "sleeps or stopped_process or stopped_target or closed_region or killed_meanwhile or many_blocks or fetch_add or "
    "signal_comes or tensor_later"
)
"""Checks of the conformance kit on what moves bytes in a way of its own over these transports."""


two = shared_ranks(2, "ucx")


@pytest.fixture(params=[SHARED_MEMORY, TCP])
def tls(request: pytest.FixtureRequest) -> str:
    """The transports that UCX is told to use."""
    return str(request.param)


def over(comm: Communicator, tls: str) -> Communicator:
    """A communicator of the same ranks over other transports, independent of the cluster's."""
    os.environ["UCX_TLS"] = tls
    try:
        return comms.connect("ucx", rank=comm.rank, size=comm.size, rendezvous=comm._context.store, name=f"over {tls}")
    finally:
        del os.environ["UCX_TLS"]


@on_ranks(1, "gloo")
def test_a_joining_process_loads_ucx_in_the_background(comm: Communicator) -> None:
    """It loads once a process, so a promoted spare has it already. It holds nothing afterwards."""
    import sys

    from holdfast.backends.ucx import worker
    from holdfast.comms.connect import runnable_backends

    assert "holdfast.backends.ucx.handshake" not in sys.modules
    for expected in (1, 0):
        assert runnable_backends("ucx", torch.device("cpu"))[0] == ["ucx"]
        loading = [thread for thread in threading.enumerate() if thread.name == "holdfast-ucx-start"]
        assert len(loading) == expected
        for thread in loading:
            thread.join(10.0)
    assert "holdfast.backends.ucx.handshake" in sys.modules and not worker._in_use


@pytest.mark.parametrize(
    ("tls", "checks"),
    [
        pytest.param(AS_IN_HARDWARE, ONE_SIDED, id="as in hardware"),
        pytest.param(TCP, f"{ONE_SIDED} or named_to or abort_ or all_others[1]", id="tcp"),
        pytest.param(TCP, "payloads or hundred or gather or objects", marks=pytest.mark.thorough, id="tcp, more"),
    ],
)
def test_the_conformance_kit_passes_over_transports_that_ucx_does_not_take_on_one_host(tls: str, checks: str) -> None:
    environ = {**os.environ, "UCX_TLS": tls}
    arguments = ("conformance", "--backend", "ucx", "-n", "3", "-k", checks, "--json")
    done = run_holdfast(*arguments, environ=environ, timeout=PROGRAM_SECONDS)
    outcomes = {check["check"]: check["outcome"] for check in json.loads(done.stdout)["checks"]}
    assert len(outcomes) > 7 and set(outcomes.values()) == {"passed"}, done.stdout


# -- messages


@on_ranks_of("two")
def test_a_message_arrives_while_its_sender_computes(comm: Communicator, tls: str, tmp_path: Path) -> None:
    """The sender makes no call until the message has arrived."""
    with over(comm, tls) as part:
        part.barrier()
        if part.rank == 0:
            part.send(torch.ones(50), 1)
            eventually((tmp_path / "arrived").exists)
        else:
            part.recv(torch.empty(50), 0)
            (tmp_path / "arrived").touch()
        part.barrier()


@on_ranks_of("two")
def test_an_op_that_its_sender_aborted_fails_at_the_receiver(comm: Communicator, tls: str) -> None:
    with over(comm, tls) as part:
        tensor = torch.ones(1_000_000)
        if part.rank == 0:
            with pytest.raises(OpTimeout):
                part.send(tensor, 1, timeout=0.2)
            tensor.zero_()
            comm.barrier()
        else:
            comm.barrier()
            with pytest.raises((Revoked, PeerFailed)):
                part.recv(tensor, 0, timeout=10.0)


# -- ends


@on_ranks(2, "ucx", killed=(1,), timeout=60.0)
def test_a_stopped_rank_is_named_and_closing_does_not_wait_for_it(comm: Communicator, tls: str) -> None:
    part = over(comm, tls)
    part.barrier()
    if part.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    with pytest.raises(OpTimeout) as caught:
        part.send(torch.ones(1_000_000), 1, timeout=0.5)
    assert caught.value.missing_ranks == (1,)
    began = time.monotonic()
    part.close()
    assert time.monotonic() - began < PATIENCE
    os.kill(comm.peers[1].pid, signal.SIGKILL)


def test_a_rank_killed_while_ucx_makes_a_segment_leaves_no_file() -> None:
    """UCX gives a segment a name in a directory, and unlinks it soon; the cluster removes the directory."""

    def body(comm: Communicator) -> str:
        folder = os.environ["UCX_POSIX_DIR"]
        assert f"{folder}/ucx_shm_posix" in Path("/proc/self/maps").read_text()
        if comm.rank == 1:
            (Path(folder) / "ucx_shm_posix_half_made").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return folder

    with LocalCluster(2, "ucx", environ={"UCX_TLS": SHARED_MEMORY}) as cluster:
        survivor, _ = cluster.outcomes(body)
        assert survivor.error is None
        folder = str(survivor.value)
        assert Path(folder).exists()
    assert not Path(folder).exists()


# -- Ctrl-C


class CutShort:
    """The functions of libucp. The main thread is interrupted as the `at`th of its calls from now on returns."""

    def __init__(self, call: Any) -> None:
        self._functions, self.at = call, 0
        self.writes: dict[int, int] = {}
        """The requests of receives that have not ended, with the addresses that UCX may write to."""
        self._begun, self.wrong = set[int](), list[str]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)

        def call(*given: Any) -> Any:
            if "_request_" in name:
                request = given[0] if isinstance(given[0], int) else given[1]
                if request not in self._begun:
                    self.wrong.append(f"{name} of a request that was freed")
                    return libucp.OK
            found = function(*given)
            if name.endswith("_nbx") and found > 0:
                self._begun.add(found)
                if name == "ucp_tag_recv_nbx":
                    self.writes[found] = given[1]
            elif name in ("ucp_request_check_status", "ucp_tag_recv_request_test") and found != libucp.IN_PROGRESS:
                self.writes.pop(request, None)
            elif name == "ucp_request_free":
                self._begun.discard(request)
            elif name == "ucp_worker_destroy":
                self.writes.clear()
            if name != "ucp_worker_progress" and threading.current_thread() is threading.main_thread():
                self.at -= 1
                if self.at == 0:
                    raise KeyboardInterrupt
            return found

        return call


def hand_over(part: Communicator) -> None:
    """End an epoch with messages under way, as a session does that goes on with the same connections."""
    transport: Any = part.transport
    for tag in range(2):
        transport._post_recv(torch.zeros(5000), 1 - part.rank, tag)
        transport._post_send(torch.zeros(5000), 1 - part.rank, 2 + tag)
    if (connections := transport.hand_over(part.peers)) is not None:
        connections.close()


@pytest.mark.parametrize("what", ["receive", "hand over"])
@on_ranks_of("two")
def test_ctrl_c_after_any_call_of_ucx_frees_no_memory_that_it_writes_to_and_no_request_twice(
    whole: Communicator, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ucx = CutShort(libucp.library().call)
    if whole.rank == 0:
        monkeypatch.setattr("holdfast.backends.ucx.worker.library", lambda: replace(libucp.library(), call=ucx))
    for turn in itertools.count(1):
        part, interrupted = whole.split([0, 1], timeout=PATIENCE), False
        into = torch.zeros(5000)
        address, memory = into.data_ptr(), weakref.ref(into)
        ucx.at = turn
        try:
            if what == "hand over":
                hand_over(part)
            elif part.rank == 0:
                part.recv(into, 1)
            else:
                part.send(torch.ones(5000), 0)
        except KeyboardInterrupt:
            interrupted = True
        except HoldfastError:  # of rank 1, whose peer was interrupted
            assert part.rank == 1
        ucx.at = 0
        del into
        if memory() is None:
            assert address not in ucx.writes.values(), f"after call {turn}"
        part.close()
        assert not ucx.wrong, f"after call {turn}"
        whole.all_reduce(going_on := torch.tensor([int(interrupted)]), timeout=PATIENCE)
        if not going_on:
            break
    assert turn > 5


# -- the memory plane


@pytest.fixture
def start(tls: str, monkeypatch: pytest.MonkeyPatch, start: Start) -> Start:
    """A function that starts child processes, in which UCX uses these transports."""
    monkeypatch.setenv("UCX_TLS", tls)
    return start


def _expose(pipe: Connection) -> None:
    with UcxPlane() as plane:
        tensor = torch.arange(1_000_000)
        region = plane.expose(tensor, writable=True)
        pipe.send(region.handle.encode())
        while pipe.recv() != "end":
            pipe.send(int(tensor.sum()))


def _use_for_ever(pipe: Connection, *calls: str) -> None:
    """Make these calls of the plane in turn, with a region that the pipe names."""
    handle = Handle.decode(pipe.recv())
    memory_of = torch.zeros(handle.nbytes, dtype=torch.uint8)
    with UcxPlane() as plane:
        getattr(plane, calls[0])(handle, memory_of[:8]).wait()
        pipe.send("using")
        for call in itertools.cycle(calls):
            getattr(plane, call)(handle, memory_of).wait()


def test_a_writer_that_dies_does_not_delay_others(start: Start) -> None:
    writers, waited = [start(_use_for_ever, "write") for _ in range(5)], []
    with UcxPlane() as plane:
        for child in writers:
            region = plane.expose(torch.ones(4 << 20, dtype=torch.uint8), writable=True)
            child.tell(region.handle.encode())
            child.hear()
            time.sleep(0.01)
            child.kill()
            began = time.monotonic()
            plane.write(region.handle, torch.ones(10, dtype=torch.uint8), timeout=PATIENCE).wait()
            region.close()
            waited.append(time.monotonic() - began)
    assert statistics.median(waited) < WRITER_SECONDS, "whether a kill comes inside of a block is chance"


def test_a_damaged_handle_is_refused() -> None:
    with comms.memory("ucx") as plane, plane.expose(torch.ones(8)) as region:
        for position in (0, 9, 50, -1):
            address = bytearray(region.handle.address)
            address[position] ^= 1
            with pytest.raises(CorruptData):
                plane.read(Handle("ucx", bytes(address), 32), torch.zeros(8)).wait()


# -- windows


@pytest.mark.parametrize("answering", [False, True])
@on_ranks(2, "ucx", killed=(1,), timeout=60.0)
def test_the_caller_of_an_atomic_survives_the_death_of_its_target(
    comm: Communicator, tls: str, answering: bool
) -> None:
    """UCX ends a process that has to cancel an atomic which could not leave, such as one that is `answering`."""
    part = over(comm, tls)
    shared = part.window(torch.zeros(8_000_000, dtype=torch.int64))
    part.barrier()
    if part.rank == 1:
        if answering:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            got = torch.empty(8_000_000, dtype=torch.int64)
            while True:
                shared.get(got, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3)
    for _ in range(2 if tls == TCP else 0):
        with pytest.raises(OpTimeout):
            shared.fetch_add(1, 0, 1, timeout=0.2)
    os.kill(comm.peers[1].pid, signal.SIGKILL)
    with pytest.raises(RegionGone):
        while True:
            shared.fetch_add(1, 0, 1, timeout=5.0)
    held = len(list(Path("/proc/self/fd").iterdir()))
    part.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < held


def test_an_owner_survives_answering_dead_users(start: Start) -> None:
    """The owner comes late to several requests; UCX's emulation of one-sided ops would end it there."""
    owner = start(_expose)
    handle = owner.hear()
    for _ in range(3):
        users = [start(_use_for_ever, "read", "write") for _ in range(3)]
        for user in users:
            user.tell(handle)
            user.hear()
        time.sleep(0.02)
        owner.stop()
        time.sleep(0.05)
        for user in users:
            user.kill()
        owner.resume()
        owner.tell("sum")
        owner.hear()
    owner.tell("end")
    owner.end()


@on_ranks_of("two")
def test_over_tcp_ranks_of_one_host_listen_on_loopback_alone(comm: Communicator) -> None:
    """By default UCX listens on the outside interface, and accepts any connection."""
    with over(comm, TCP) as part:
        connections = psutil.Process().net_connections("tcp4")
        part.all_reduce(torch.ones(1 << 16))
    assert {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_a_worker_that_always_has_something_to_do_keeps_nobody_from_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX may open a connection to a dead process again and again: each call then says that something moved."""
    calls = 0

    def something_moved(handle: object) -> int:
        nonlocal calls
        calls += 1
        assert calls < 10_000_000, "nobody looks at the clock"
        return 1

    buffer, any_tag = torch.empty(8, dtype=torch.uint8), (1, (1 << 64) - 1)
    connections = Connections(Transports.choose(one_host=True))
    worker = connections.worker
    try:
        monkeypatch.setattr(worker, "_progress", something_moved)
        request = int(worker.lib.call.ucp_tag_recv_nbx(worker.handle, buffer.data_ptr(), 8, *any_tag, worker.plain))
        assert worker.drain()
        assert not connections.settle([request], 0.01)
        ProgressThread(worker, threading.RLock()).close()
        assert not worker.finish(request, 0.01)
    finally:
        connections.close()


# -- the channel for requests: an owner moves bytes within its regions only, whatever a message asks


SIZE, REGION, READ_ONLY, NO_REGION = 64, 7, 8, 9
DONE = 0


class Itself(requests.Owner):
    """A worker that is connected to itself, so that it answers its own requests."""

    def __init__(self, over: Transports = Transports("tcp,self", {}, local=False, emulated=True)) -> None:  # noqa: B008
        self.worker = UcxWorker(libucp.FEATURE_AM, over, lambda key, why: None)
        self.requests = requests.Requests(partial(UcxChannel, self.worker, threading.RLock()))
        self.to = self.worker.connect(self.worker.address, 1)
        self.memory = torch.zeros(SIZE, dtype=torch.uint8)
        for region in (REGION, READ_ONLY):
            self.requests.expose(region, Exposed(ExposedMemory(self.memory), region == REGION))

    def check_live(self) -> None: ...

    def error(self, outcome: int, op: str) -> HoldfastError:
        self.said = outcome
        return HoldfastError(op)

    def late(self, op: str, seconds: float) -> OpTimeout:
        return OpTimeout(op, 0, seconds)

    def outcome(self, pending: requests.Pending) -> int:
        try:
            self.requests.finish(pending, time.monotonic() + 10.0, "request")
        except HoldfastError:
            return self.said
        return DONE


@pytest.fixture(scope="module")
def owner() -> Iterator[Itself]:
    made = Itself()
    yield made
    made.worker.close()


@given(
    region=st.sampled_from([REGION, READ_ONLY, NO_REGION]),
    offset=st.one_of(st.integers(0, 2 * SIZE), st.integers(0, 2**64 - 1)),
    nbytes=st.integers(0, 2 * SIZE),
    writing=st.booleans(),
)
def test_bytes_within_a_region_are_moved_and_no_others(
    owner: Itself, region: int, offset: int, nbytes: int, writing: bool
) -> None:
    owner.memory.copy_(torch.arange(SIZE))
    before, mine = owner.memory.clone(), torch.full((2 * SIZE,), 200, dtype=torch.uint8)
    head = Head(requests.PUT if writing else requests.GET, region, offset=offset, nbytes=nbytes)
    bytes_of: dict[str, Any] = {"body": bytes([200]) * nbytes} if writing else {"into": mine.data_ptr()}
    pending = owner.requests.begin(owner, head, **bytes_of)
    outcome = owner.outcome(pending)
    refused = offset + nbytes > SIZE or (writing and region == READ_ONLY)
    assert outcome == (requests.GONE if region == NO_REGION else requests.REFUSED if refused else DONE)
    if outcome == DONE and writing:
        before[offset : offset + nbytes] = 200
    elif outcome == DONE:
        assert torch.equal(mine[:nbytes], before[offset : offset + nbytes])
        assert (mine[nbytes:] == 200).all()
    assert torch.equal(owner.memory, before)


@given(number=st.integers(0, 3), header=st.binary(max_size=96), payload=st.binary(max_size=300))
def test_spoilt_messages_change_nothing(owner: Itself, number: int, header: bytes, payload: bytes) -> None:
    owner.memory.copy_(torch.arange(SIZE))
    ffi, call = owner.worker.lib.ffi, owner.worker.lib.call
    source = ffi.from_buffer(payload)
    params = ffi.new("ucp_request_param_t *", {"op_attr_mask": libucp.ATTR_FLAGS, "flags": libucp.AM_COPY_HEADER})
    at = int(ffi.cast("uintptr_t", source))
    request = call.ucp_am_send_nbx(owner.to, number, header, len(header), at, len(payload), params)
    owner.worker.finish(request, 5.0)
    valid = owner.requests.begin(owner, Head(requests.GET, REGION, nbytes=8))
    assert owner.outcome(valid) == DONE, "valid requests are answered"
    assert torch.equal(owner.memory, torch.arange(SIZE, dtype=torch.uint8))


def test_where_the_network_reads_memory_a_large_body_stays_with_its_sender_until_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A put goes straight into the region. One that does not fit is refused, and changes nothing."""
    read = list[int]()
    begin = UcxChannel._receive_body
    monkeypatch.setattr(UcxChannel, "_receive_body", lambda self, *of: (read.append(of[-1]), begin(self, *of))[1])
    owner = Itself(Transports("posix,cma,ib,self", {"RNDV_THRESH": "64k"}, local=False, emulated=False))
    count, deadline = requests.PIECE_BYTES + 1000, time.monotonic() + 20.0
    memory, source = torch.zeros(count, dtype=torch.uint8), (torch.arange(count) % 251).to(torch.uint8)
    owner.requests.expose(12, Exposed(ExposedMemory(memory)))
    owner.requests.write(owner, 12, 0, span(source), source, deadline, "put")
    assert torch.equal(memory, source) and requests.PIECE_BYTES in read
    got, zeros = torch.zeros_like(source), torch.zeros_like(source)
    owner.requests.read(owner, 12, 0, span(got), got, deadline, "get")
    assert torch.equal(got, source)
    with pytest.raises(HoldfastError):
        owner.requests.write(owner, 12, 2000, span(zeros), zeros, deadline, "put")
    assert owner.said == requests.REFUSED and torch.equal(memory, source)
    owner.worker.close()
