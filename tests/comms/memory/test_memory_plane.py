"""`MemoryPlane` on every plane, with a live, a stopped and a dead owner."""

from __future__ import annotations

import fcntl
import gc
import importlib
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast import comms
from holdfast.backends.common import host_plane, shareable_memory
from holdfast.backends.common.host_plane import HostPlane
from holdfast.backends.common.region_table import TableAddress
from holdfast.backends.inproc.transport import InprocPlane
from holdfast.backends.nixl.plane import NixlAgent, NixlPlane
from holdfast.backends.ucx.memory_plane import UcxPlane
from holdfast.backends.ucx.worker import Transports
from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import BackendUnavailable, CorruptData, OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle, MemoryPlane, memory
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import Available, Unavailable
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.planes import *  # noqa: F403
from support.children import Child, children
from support.memory import needs_huge_pages, smaps_field
from support.waiting import eventually

OPENERS: dict[str, Callable[[], MemoryPlane]] = {
    "inproc": InprocPlane,
    "shm": HostPlane,
    "ucx": UcxPlane,
    "nixl": NixlPlane,
}


@pytest.fixture(params=["inproc", "shm", "ucx over tcp", "nixl over tcp"])  # on one host ucx and nixl are as shm
def plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryPlane]:
    name, *between_hosts = request.param.split(" over ")
    if between_hosts:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    with OPENERS[name]() as opened:
        yield opened


# -- on every plane: what the conformance kit does not check


def test_a_read_returns_the_current_values_of_a_tensor_of_any_dtype(plane: MemoryPlane) -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        tensor, into = torch.zeros(33, dtype=dtype), torch.zeros(33, dtype=dtype)
        with plane.expose(tensor) as region:
            assert len(region.handle.encode()) < 512
            tensor.copy_(torch.arange(33) % 2)
            plane.read(region.handle, into).wait()
            assert torch.equal(into.view(torch.uint8), tensor.view(torch.uint8))


def test_a_read_of_zero_bytes_needs_an_existing_region(plane: MemoryPlane) -> None:
    region = plane.expose(torch.empty(0))
    plane.read(region.handle, torch.empty(0)).wait()
    region.close()
    with pytest.raises(RegionGone):
        plane.read(region.handle, torch.empty(0)).wait()


def test_a_copy_within_one_buffer_is_right_or_refused(plane: MemoryPlane) -> None:
    """A copy in blocks would read bytes that it has overwritten."""
    base = torch.arange(3 * host_plane.BLOCK_BYTES // 4, dtype=torch.int32)
    before, half = base.clone(), base.numel() // 2
    with plane.expose(base, writable=True) as region:
        for copy in (plane.read, plane.write):
            for first, offset in ((1, 0), (0, 4), (half - 1, 0)):
                with pytest.raises(ValueError, match="overlaps"):
                    copy(region.handle, base[first : first + half], offset)
        assert torch.equal(base, before)
        plane.read(region.handle, base[:half]).wait()
        assert torch.equal(base, before)
        plane.read(region.handle, base[half:], 0).wait()
        assert torch.equal(base, torch.cat([before[:half], before[:half]]))
    with plane.expose(before) as region:
        plane.read(region.handle, base).wait()
        assert torch.equal(base, before)


def test_tensors_that_are_not_plain_memory_are_refused(plane: MemoryPlane) -> None:
    with plane.expose(torch.zeros(4, 4)) as region, pytest.raises(TypeError):
        plane.read(region.handle, [0.0] * 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        plane.expose(torch.zeros(4, 4)[:, 1])
    with pytest.raises(ValueError, match="resolve"):
        plane.expose(torch.zeros(4, dtype=torch.complex64).conj())


def test_a_malformed_handle_is_corrupt_data(plane: MemoryPlane) -> None:
    dice = random.Random(5)
    for _ in range(200):
        garbage = dice.randbytes(dice.randrange(60))
        with pytest.raises(CorruptData):
            plane.read(Handle(plane.name, garbage, 8), torch.zeros(2)).wait()
        with pytest.raises(CorruptData):
            Handle.decode(garbage)


@pytest.mark.parametrize("known", [False, True])
def test_a_handle_that_claims_more_than_its_region_has_moves_nothing(plane: MemoryPlane, known: bool) -> None:
    """No byte moves, whether or not the plane knows the region. Only test memory lies around the region."""
    memory = torch.zeros(32)
    with plane.expose(memory[:8], writable=True) as region:
        if known:
            plane.read(region.handle, torch.empty(8)).wait()
        forged = Handle(plane.name, region.handle.address, memory.nbytes)
        into = torch.ones(16)
        with pytest.raises(CorruptData, match="forged"):
            plane.read(forged, into).wait()
        with pytest.raises(CorruptData, match="forged"):
            plane.write(forged, into).wait()
        assert into.tolist() == [1.0] * 16
        assert not memory.any()


def test_reading_counts_as_changing_the_tensor(plane: MemoryPlane) -> None:
    """Autograd detects that a saved tensor was overwritten, as for an in-place op."""
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    with plane.expose(torch.zeros(4)) as region:
        plane.read(region.handle, weight).wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_huge_pages
def test_large_memory_from_empty_lies_on_huge_pages(plane: MemoryPlane) -> None:
    """Reads of another process's huge pages are as fast as local copies; small pages take twice as long."""
    assert " hg" in smaps_field(plane.empty(32 << 20).fill_(3), "VmFlags")
    small = [plane.empty(100) for _ in range(3)]
    assert any(each.data_ptr() % mmap.PAGESIZE for each in small), "they need no pages of their own"
    assert {each.shape for each in small} == {(100,)}


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch use two threads, which share a large copy."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_large_read_is_shared_among_threads_and_ends_with_them(plane: MemoryPlane) -> None:
    """Sizes and offset are odd. If the region closes during the read, all threads stop."""
    tensor = torch.arange(2 * shareable_memory.SHARE_BYTES + 12_345, dtype=torch.int32).view(torch.uint8)
    into = torch.zeros(tensor.nbytes - 7, dtype=torch.uint8)
    with plane.expose(tensor) as region:
        plane.read(region.handle, into, 7).wait()
        assert torch.equal(into, tensor[7:])
        with pytest.raises(OpTimeout):
            plane.read(region.handle, into, timeout=0.0).wait()
    running = set(threading.enumerate())
    with pytest.raises(RegionGone):
        plane.read(region.handle, into).wait()
    assert set(threading.enumerate()) <= running


# -- inproc


def test_an_inproc_handle_is_refused_in_another_process(start: Callable[..., Child]) -> None:
    def child(pipe: Connection, handle: Handle) -> None:
        try:
            InprocPlane().read(handle, torch.zeros(8)).wait()
        except Unsupported as error:
            pipe.send(str(error))

    with InprocPlane() as plane, plane.expose(torch.zeros(8)) as region:
        assert "shm" in start(child, region.handle).hear()


# -- shm: the memory belongs to another process


def _owner(pipe: Connection, nbytes: int = 1 << 20) -> None:
    """Expose a tensor of ones, and execute commands from the pipe until it closes."""
    plane = HostPlane()
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    region = plane.expose(tensor, writable=True)
    pipe.send(region.handle)
    while True:
        match pipe.recv():
            case "sum":
                pipe.send(int(tensor.sum()))
            case "exec":
                os.execvp("sleep", ["sleep", "60"])


@pytest.mark.usefixtures("two_threads")
def test_a_read_by_several_threads_notices_that_its_owner_was_killed_meanwhile(start: Callable[..., Child]) -> None:
    owner = start(_owner, 64 << 20)
    handle, into = owner.hear(), torch.zeros(64 << 20, dtype=torch.uint8)
    with HostPlane() as plane:
        killer = threading.Timer(0.1, owner.kill)
        killer.start()
        with pytest.raises(RegionGone, match=str(owner.pid)):
            while True:
                plane.read(handle, into).wait()
        killer.join()
        with pytest.raises(RegionGone, match=str(owner.pid)):
            plane.write(handle, into).wait()


def test_a_process_that_runs_another_program_exposes_nothing(start: Callable[..., Child]) -> None:
    """Same pid, same start time, other memory."""
    owner = start(_owner)
    handle, into = owner.hear(), torch.zeros(1 << 20, dtype=torch.uint8)
    with HostPlane() as plane:
        plane.read(handle, into).wait()
        owner.tell("exec")
        eventually(lambda: Path(f"/proc/{owner.pid}/comm").read_text() == "sleep\n", 10.0)
        with pytest.raises(RegionGone):
            plane.read(handle, into).wait()
        with HostPlane() as fresh, pytest.raises(RegionGone):
            fresh.read(handle, into).wait()


def _mappable_owner(pipe: Connection) -> None:
    with HostPlane() as plane:
        memory = plane.empty(1 << 20, mappable=True)
        memory.zero_()
        with plane.expose(memory, writable=True) as region, plane.expose(memory[:4096]) as read_only:
            pipe.send((region.handle, read_only.handle))
            pipe.recv()
            pipe.send(int(memory.sum()))


def test_what_is_written_into_a_writable_mapping_is_in_the_region(start: Callable[..., Child]) -> None:
    owner = start(_mappable_owner)
    handle, read_only = owner.hear()
    with HostPlane() as plane:
        mapped = plane.map_writable(handle)
        mapped[100:200] = 1
        assert plane.map_writable(handle).data_ptr() == mapped.data_ptr(), "mapped once"
        private = plane.map(handle, lasting=False)
        private[:50] = 1
        with pytest.raises(Unsupported, match="read-only"):
            plane.map_writable(read_only)
        owner.tell("written")
        assert owner.hear() == 100
        owner.end()
        with pytest.raises(RegionGone):
            plane.map_writable(handle)
        assert mapped.sum() == 100, "a mapping outlives its region"


def test_memory_that_is_no_file_is_not_mapped(plane: MemoryPlane) -> None:
    with plane.expose(torch.zeros(100), writable=True) as region, pytest.raises(Unsupported, match="mapping"):
        plane.map_writable(region.handle)


def test_forged_handles_access_no_memory(start: Callable[..., Child]) -> None:
    owner = start(_owner)
    handle = owner.hear()
    true = TableAddress.decode(handle.address)
    started = msgspec.structs.replace(true.owner, started=true.owner.started - 1)
    of_files: list[dict[str, Any]] = [{"descriptor": 0}, {"descriptor": 1 << 30}, {"owner": started}]
    forgeries: list[dict[str, Any]] = [
        {"base": true.base + 32},
        {"base": true.base ^ 1 << 40},
        {"slot": true.slot + 1},
        {"slot": (1 << 20) - 1},
        {"generation": true.generation + 1},
        {"owner": msgspec.structs.replace(true.owner, pid=1)},
    ]
    with HostPlane() as plane:
        for forgery in (*of_files, *forgeries):
            forged = Handle("shm", msgspec.structs.replace(true, **forgery).encode(), handle.nbytes)
            into = torch.zeros(1 << 20, dtype=torch.uint8)
            if forgery in forgeries:  # a reader opens no file: it knows a region by its generation
                with pytest.raises((RegionGone, BackendUnavailable)):
                    plane.read(forged, into).wait()
            with pytest.raises((RegionGone, BackendUnavailable)):
                plane.write(forged, into).wait()
            assert int(into.sum()) == 0
        for bad in ({"pid": 0}, {"pid": -1}, {"pid": 1 << 40}):
            forged_owner = msgspec.structs.replace(true.owner, **bad)
            forged = Handle("shm", msgspec.structs.replace(true, owner=forged_owner).encode(), handle.nbytes)
            with pytest.raises(CorruptData):
                plane.read(forged, torch.zeros(8)).wait()
        elsewhere = msgspec.structs.replace(true.owner, host="another")
        forged = Handle("shm", msgspec.structs.replace(true, owner=elsewhere).encode(), handle.nbytes)
        with pytest.raises(Unsupported, match="another host"):
            plane.read(forged, torch.zeros(8)).wait()
    owner.tell("sum")
    assert owner.hear() == 1 << 20


def test_a_forked_child_does_not_own_its_parents_regions(start: Callable[..., Child]) -> None:
    def child(pipe: Connection) -> None:
        region.close()
        mine = plane.expose(torch.full((8,), 2.0))
        pipe.send(mine.handle)
        into = torch.zeros(8)
        plane.read(region.handle, into).wait()
        pipe.send(into.tolist())
        plane.close()
        pipe.send("closed")
        pipe.recv()

    with HostPlane() as plane, plane.expose(torch.ones(8)) as region:
        forked = start(child)
        theirs, into = forked.hear(), torch.zeros(8)
        assert forked.hear() == [1.0] * 8
        assert forked.hear() == "closed"
        plane.read(region.handle, into).wait()
        assert into.tolist() == [1.0] * 8
        with pytest.raises(RegionGone):
            plane.read(theirs, into).wait()


@pytest.mark.parametrize("closed", [False, True])
def test_an_agent_that_was_dropped_does_not_end_in_a_forked_child(
    closed: bool, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child's destructor would end what both processes share: memory that both map, and the set of socket events.

    An agent that was closed is NIXL's until nothing refers to it, such as the traceback of an error.
    """

    def collects(pipe: Connection) -> None:
        gc.collect()
        pipe.send("collected")

    monkeypatch.setenv("UCX_TLS", "tcp,self")

    def drops(pipe: Connection) -> None:
        gc.disable()
        gc.freeze()  # what other tests have left in this process may wait for its threads when it is destroyed
        agent = NixlAgent(Transports.choose(one_host=True))
        circle: list[object] = [agent._api if closed else agent]
        circle.append(circle)
        if closed:
            agent.close()
        del agent, circle
        with children() as begin:
            assert begin(collects).hear() == "collected"
        gc.collect()
        pipe.send("ended it")

    assert start(drops).hear() == "ended it"


def test_close_waits_for_a_block_that_is_being_written(start: Callable[..., Child]) -> None:
    """A writer never overwrites bytes that the owner writes after `close`."""

    def writer(pipe: Connection, handle: Handle) -> None:
        source = torch.ones(handle.nbytes, dtype=torch.uint8)
        with HostPlane() as mine:
            pipe.send("writing")
            try:
                while True:
                    mine.write(handle, source).wait()
            except RegionGone:
                pipe.send("gone")

    with HostPlane() as plane:
        for _ in range(3):
            tensor = plane.empty(16 << 20).zero_()
            region = plane.expose(tensor, writable=True)
            child = start(writer, region.handle)
            child.hear()
            time.sleep(0.03)
            region.close()
            tensor.fill_(2)
            assert child.hear() == "gone"
            assert bool((tensor == 2).all())


def test_close_times_out_on_a_writer_stopped_in_the_middle_of_a_block(
    monkeypatch: pytest.MonkeyPatch, start: Callable[..., Child]
) -> None:
    def writer(pipe: Connection, descriptor: int) -> None:
        fd = os.open(f"/proc/{os.getppid()}/fd/{descriptor}", os.O_RDONLY)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, b"\0" * 32)
        pipe.send("locked")
        pipe.recv()

    monkeypatch.setattr("holdfast.backends.common.region_table.WRITER_SECONDS", 0.2)
    with HostPlane() as plane:
        region = plane.expose(torch.zeros(8), writable=True)
        child = start(writer, TableAddress.decode(region.handle.address).descriptor)
        child.hear()
        with pytest.raises(OpTimeout, match="writing"):
            region.close()
        with pytest.raises(RegionGone):
            plane.read(region.handle, torch.zeros(8)).wait()


def test_thousands_of_regions_reuse_their_slots() -> None:
    with HostPlane() as plane:
        tensor, into = torch.ones(8), torch.zeros(8)
        open_now = [plane.expose(tensor) for _ in range(3000)]
        slots = {region.slot for region in open_now}
        assert len(slots) == 3000
        for region in open_now:
            plane.read(region.handle, into).wait()
            region.close()
        again = plane.expose(tensor)
        assert again.slot in slots
        plane.read(again.handle, into).wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to drop its own capabilities")
def test_a_process_of_another_user_may_not_read(start: Callable[..., Child]) -> None:
    def reader(pipe: Connection, handle: Handle) -> None:
        os.setgid(65534)
        os.setuid(65534)
        try:
            HostPlane().read(handle, torch.zeros(8)).wait()
        except BackendUnavailable as error:
            pipe.send(str(error))

    with HostPlane() as plane, plane.expose(torch.ones(8)) as region:
        assert "one user" in start(reader, region.handle).hear()


# -- by name


def test_memory_opens_a_plane_by_name() -> None:
    with memory("auto") as plane:
        assert plane.name == "shm"
    with memory("inproc") as plane:
        assert plane.name == "inproc"
    with pytest.raises(BackendUnavailable, match="known are"):
        memory("nonsense")
    with pytest.raises(BackendUnavailable, match="no memory plane"):
        memory("gloo")


@pytest.fixture(params=["inproc", "shm", "ucx", "nixl"])
def planed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["shm", "ucx", "nixl"])
def planed_processes(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_nixl_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.backends import nixl

    assert registry().backend("nixl").available
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status = nixl.probe()
    assert isinstance(status, Unavailable)
    assert "not installed" in status.reason and "pip install --no-deps nixl" in status.install_hint


def test_nixl_needs_the_library_for_the_cuda_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL takes that of torch's CUDA and no other, whether there is a GPU or not."""
    from holdfast.backends import nixl

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nixl_cu13" else object())
    status = nixl.probe()
    assert isinstance(status, Unavailable)
    assert "nixl-cu13" in status.reason and "pip install --no-deps nixl nixl-cu13" in status.install_hint
    monkeypatch.setattr("torch.version.cuda", "12.8")
    assert isinstance(nixl.probe(), Available)


COUNT = 1 << 16
"""Elements of a region."""

planes = pytest.mark.parametrize(
    ("plane", "rounds"),
    [
        ("shm", 10),
        ("ucx", 5),
        ("nixl", 3),
        pytest.param("nixl", 100, marks=[pytest.mark.thorough, pytest.mark.timeout(600)]),
    ],
)


def live(pipe: Connection, plane: str, number: int) -> None:
    """Expose a tensor full of `number`; read each region that arrives, and say its ends, or that it is gone."""
    with comms.memory(plane) as opened:
        region = opened.expose(torch.full((COUNT,), float(number)))
        pipe.send(region.handle.encode())
        while True:
            handle, into = Handle.decode(pipe.recv()), torch.zeros(COUNT)
            try:
                opened.read(handle, into, timeout=10.0).wait()
                pipe.send((into[0].item(), into[-1].item()))
            except RegionGone:
                pipe.send("gone")


def seen(reader: Child, handle: bytes) -> object:
    reader.tell(handle)
    return reader.hear()


@planes
def test_a_process_outlives_those_that_it_reads_and_those_that_read_it(plane: str, rounds: int) -> None:
    """Their parent does not use NIXL, which works in no process that was forked beside it."""

    def body(comm: Communicator) -> None:
        os.environ["UCX_TLS"] = "tcp,self"  # on one host the kernel copies
        if plane == "nixl":
            importlib.import_module("nixl._api")
        with children() as start:
            lasting = start(live, plane, rounds)
            held = lasting.hear()
            for number in range(rounds):
                passing = start(live, plane, number)
                handle = passing.hear()
                assert seen(lasting, handle) == (number, number)
                assert seen(passing, held) == (rounds, rounds)
                passing.tell(held)  # killed in the middle of a read, perhaps
                passing.kill()
                assert seen(lasting, handle) == "gone"

    with LocalCluster(1, "shm", timeout=540.0) as cluster:
        cluster.run(body)


def test_nixl_says_why_it_does_not_work_in_a_process_that_was_forked_beside_it(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")

    def body(pipe: Connection) -> None:
        with comms.memory("nixl") as plane:
            try:
                plane.expose(torch.ones(4))
            except BackendUnavailable as refused:
                pipe.send(str(refused))
            pipe.send("exposed")

    with comms.memory("nixl") as plane, plane.expose(torch.ones(4)):
        assert "forked" in start(body).hear()
    assert start(body).hear() == "exposed"
