"""`MemoryPlane` on every plane, with a live, a stopped and a dead owner."""

from __future__ import annotations

import fcntl
import gc
import importlib
import mmap
import os
import random
import re
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import comms
from holdfast.backends import nixl
from holdfast.backends.common import host_plane, shareable_memory
from holdfast.backends.common.host_plane import HostPlane
from holdfast.backends.common.process_memory import HUGE_PAGE, put_on_huge_pages
from holdfast.backends.common.region_table import TableAddress
from holdfast.backends.nixl.plane import NixlAgent
from holdfast.backends.ucx.worker import Transports
from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import BackendUnavailable, CorruptData, OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle, MemoryPlane, memory
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import Available, Unavailable
from holdfast.comms.system.files import touched_pages
from holdfast.harness.conformance.planes import *  # noqa: F403
from support.children import Child, children
from support.comms.ranks import each_of, on_ranks
from support.waiting import eventually


@pytest.fixture(params=["inproc", "shm", "ucx over tcp", "nixl over tcp"])  # on one host ucx and nixl are as shm
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    plane, _, between_hosts = str(request.param).partition(" over ")
    if between_hosts:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    return plane


@pytest.fixture
def plane(name: str) -> Iterator[MemoryPlane]:
    with memory(name) as opened:
        yield opened


# -- on every plane: what the conformance kit does not check


def test_a_read_returns_the_current_values_of_a_tensor_of_any_dtype(plane: MemoryPlane) -> None:
    for dtype, count in product((torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64), (0, 33)):
        tensor, into = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)
        with plane.expose(tensor) as region:
            assert len(region.handle.encode()) < 512
            tensor.copy_(torch.arange(count) % 2)
            plane.read(region.handle, into).wait()
            assert torch.equal(into.view(torch.uint8), tensor.view(torch.uint8))


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


needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="needs transparent huge pages"
)


def smaps_field(tensor: torch.Tensor, field: str) -> str:
    """A field of the mapping in /proc/self/smaps that holds all of a tensor."""
    inside, end = False, tensor.data_ptr() + tensor.nbytes
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= tensor.data_ptr() and end <= int(found[2], 16)
        elif inside and line.startswith(f"{field}:"):
            return line.removeprefix(f"{field}:")
    raise AssertionError("no single mapping holds it")


@needs_huge_pages
def test_large_memory_from_empty_lies_on_huge_pages(plane: MemoryPlane) -> None:
    """Reads of another process's huge pages are as fast as local copies; small pages take twice as long."""
    assert " hg" in smaps_field(plane.empty(32 << 20).fill_(3), "VmFlags")
    small = [plane.empty(100) for _ in range(3)]
    assert any(each.data_ptr() % mmap.PAGESIZE for each in small), "they need no pages of their own"
    assert {each.shape for each in small} == {(100,)}


def test_a_large_read_is_shared_among_threads_and_ends_with_them(
    plane: MemoryPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and offset are odd. If the region closes during the read, all threads stop."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
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


# -- shm: the memory belongs to another process


def _owner(pipe: Connection, name: str = "shm", nbytes: int = 1 << 20) -> None:
    """Expose ones in plain memory, in mappable memory, and in a part of that read-only; obey commands."""
    with memory(name) as plane:
        plain, mappable = torch.ones(nbytes, dtype=torch.uint8), plane.empty(nbytes, mappable=True).fill_(1)
        regions = [plane.expose(tensor, writable=True) for tensor in (plain, mappable)]
        regions.append(plane.expose(mappable[4096:]))
        pipe.send([region.handle for region in regions])
        while (command := pipe.recv()) != "end":
            match command:
                case "sum":
                    pipe.send((int(plain.sum()), int(mappable.sum())))
                case "lent":
                    pipe.send(plane.is_lent(mappable))
                case "close":
                    for region in regions:
                        region.close()
                    pipe.send("closed")
                case "exec":
                    os.execvp("sleep", ["sleep", "60"])


def asked(child: Child, message: object) -> object:
    child.tell(message)
    return child.hear()


def test_a_read_by_several_threads_notices_that_its_owner_was_killed_meanwhile(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    owner = start(_owner, "shm", 64 << 20)
    (handle, *_), into = owner.hear(), torch.zeros(64 << 20, dtype=torch.uint8)
    with HostPlane() as plane:
        killer = threading.Timer(0.1, owner.kill)
        killer.start()
        with pytest.raises(RegionGone, match=str(owner.pid)):
            while True:
                plane.read(handle, into).wait()
        killer.join()
        with pytest.raises(RegionGone, match=str(owner.pid)):
            plane.write(handle, into).wait()


def test_a_plane_that_another_thread_closes_while_it_exposes_memory_leaves_no_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane, expose = HostPlane(), host_plane.ExposedMemory

    def closed_meanwhile(tensor: torch.Tensor) -> Any:
        plane.close()
        return expose(tensor)

    monkeypatch.setattr(host_plane, "ExposedMemory", closed_meanwhile)
    with pytest.raises(RegionGone, match="was closed"):
        plane.expose(torch.zeros(8))
    assert plane._table is None


def test_a_process_that_runs_another_program_exposes_nothing(start: Callable[..., Child]) -> None:
    """Same pid, same start time, other memory."""
    owner = start(_owner)
    (handle, *_), into = owner.hear(), torch.zeros(1 << 20, dtype=torch.uint8)
    with HostPlane() as plane:
        plane.read(handle, into).wait()
        owner.tell("exec")
        eventually(lambda: Path(f"/proc/{owner.pid}/comm").read_text() == "sleep\n")
        with pytest.raises(RegionGone):
            plane.read(handle, into).wait()
        with HostPlane() as fresh, pytest.raises(RegionGone):
            fresh.read(handle, into).wait()


def test_what_is_written_into_a_writable_mapping_is_in_the_region(start: Callable[..., Child]) -> None:
    owner = start(_owner)
    plain, handle, read_only = owner.hear()
    with HostPlane() as plane:
        mapped = plane.map_writable(handle)
        mapped[100:200] = 2
        assert plane.map_writable(handle).data_ptr() == mapped.data_ptr(), "mapped once"
        private = plane.map(handle, lasting=False)
        private[:50] = 2
        for refused, why in ((read_only, "read-only"), (plain, "mapping")):
            with pytest.raises(Unsupported, match=why):
                plane.map_writable(refused)
        assert asked(owner, "sum") == (1 << 20, (1 << 20) + 100)
        owner.tell("end")
        owner.end()
        with pytest.raises(RegionGone):
            plane.map_writable(handle)
        assert mapped.sum() == (1 << 20) + 100, "a mapping outlives its region"


def test_forged_handles_access_no_memory(start: Callable[..., Child]) -> None:
    owner = start(_owner)
    (handle, *_), gone = owner.hear(), (RegionGone, BackendUnavailable)
    true = TableAddress.decode(handle.address)

    def forged(owner: dict[str, Any] | None = None, **fields: Any) -> Handle:
        process = msgspec.structs.replace(true.owner, **(owner or {}))
        return Handle("shm", msgspec.structs.replace(true, owner=process, **fields).encode(), handle.nbytes)

    # A reader opens no file: it knows a region by its generation.
    of_files = [forged(descriptor=0), forged(descriptor=1 << 30), forged({"started": true.owner.started - 1})]
    forgeries = [
        forged(base=true.base + 32),
        forged(base=true.base ^ 1 << 40),
        forged(slot=true.slot + 1),
        forged(slot=(1 << 20) - 1),
        forged(generation=true.generation + 1),
        forged({"pid": 1}),
    ]
    into = torch.zeros(1 << 20, dtype=torch.uint8)
    with HostPlane() as plane:
        for forgery in forgeries:
            with pytest.raises(gone):
                plane.read(forgery, into).wait()
        for forgery in (*of_files, *forgeries):
            with pytest.raises(gone):
                plane.write(forgery, into).wait()
        assert int(into.sum()) == 0
        for pid in (0, -1, 1 << 40):
            with pytest.raises(CorruptData):
                plane.read(forged({"pid": pid}), into[:8]).wait()
        with pytest.raises(Unsupported, match="another host"):
            plane.read(forged({"host": "another"}), into[:8]).wait()
    assert asked(owner, "sum") == (1 << 20, 1 << 20)


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


@pytest.mark.parametrize("name", ["ucx over tcp", "nixl over tcp"], indirect=True)
def test_ctrl_c_amid_a_read_frees_no_memory_that_may_still_be_written_to(
    name: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late answer must not change the next read either."""

    def interrupts(pipe: Connection) -> None:
        tensor, into = torch.zeros(1 << 20), torch.zeros(1 << 20)
        opened: Any = memory(name)
        with opened as plane, plane.expose(tensor) as region:
            plane.read(region.handle, into).wait()
            network = plane._access()
            begins, how = (network.requests.channel, "send") if name == "ucx" else (network._api, "transfer")
            begin = getattr(begins, how)

            def interrupted(*given: Any) -> None:
                begin(*given)
                raise KeyboardInterrupt

            written = weakref.ref(into if name == "ucx" else network._stage)
            with network.lock:  # no answer is taken in meanwhile
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(begins, how, interrupted)
                    plane.read(region.handle, into).wait()
                del into
                gc.collect()  # the interruption's traceback refers to it, too
                assert written() is not None and (name == "ucx" or network._stage is None)
            into = torch.ones(1 << 20)
            plane.read(region.handle, into).wait()
            pipe.send(torch.equal(into, tensor))

    assert start(interrupts).hear() is True


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


# -- processes that a plane does not reach


def read(pipe: Connection, name: str, handle: Handle, user: int = 0) -> None:
    """Read a region as this user; say what keeps it from that, or that it is gone."""
    with memory(name) as plane:
        try:
            if user:
                os.setgid(user)
                os.setuid(user)
            plane.read(handle, torch.zeros(8)).wait()
        except (BackendUnavailable, RegionGone, Unsupported) as error:
            pipe.send(str(error))
        else:
            pipe.send("nothing")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to drop its own capabilities")
def test_a_process_of_another_user_may_not_read(start: Callable[..., Child]) -> None:
    with HostPlane() as plane, plane.expose(torch.ones(8)) as region:
        assert "one user" in start(read, "shm", region.handle, 65534).hear()


@pytest.mark.parametrize(("name", "why"), [("inproc", "shm"), ("ucx", "forked"), ("nixl", "forked")])
def test_a_process_that_was_forked_beside_a_plane_is_told_why_it_cannot_use_it(
    name: str, why: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with memory(name) as plane, plane.expose(torch.zeros(8)) as region:
        assert why in start(read, name, region.handle).hear()
    if name == "nixl":
        assert why not in start(read, name, region.handle).hear(), "it works in a child of later"


# -- by name


def test_memory_opens_a_plane_by_name() -> None:
    for name, opened in (("auto", "shm"), ("inproc", "inproc")):
        with memory(name) as plane:
            assert plane.name == opened
    for name, words in (("nonsense", "known are"), ("gloo", "no memory plane")):
        with pytest.raises(BackendUnavailable, match=words):
            memory(name)


planed = each_of("inproc", "shm", "ucx", "nixl")
planed_processes = each_of("shm", "ucx", "nixl")


def test_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL takes the library for torch's CUDA and no other, whether there is a GPU or not."""
    assert registry().backend("nixl").available
    monkeypatch.setattr("torch.version.cuda", "13.0")
    for lacks, reason, install in (
        (("nixl", "nixl_cu13"), "not installed", "nixl"),
        (("nixl_cu13",), "nixl-cu13", "nixl nixl-cu13"),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, lacks=lacks: None if name in lacks else object())
        status = nixl.probe()
        assert isinstance(status, Unavailable)
        assert reason in status.reason and f"pip install --no-deps {install}" in status.install_hint
    monkeypatch.setattr("torch.version.cuda", "12.8")
    assert isinstance(nixl.probe(), Available)


COUNT = 1 << 16
"""Elements of a region."""


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


@pytest.mark.parametrize(
    ("plane", "rounds"),
    [
        ("nixl", 3),
        pytest.param("ucx", 10, marks=pytest.mark.thorough),
        pytest.param("nixl", 100, marks=[pytest.mark.thorough, pytest.mark.timeout(600)]),
    ],
)
@on_ranks(1, "shm", timeout=540.0)
def test_a_process_outlives_those_that_it_reads_and_those_that_read_it(
    comm: Communicator, plane: str, rounds: int
) -> None:
    """Their parent does not use NIXL, which works in no process that was forked beside it."""
    os.environ["UCX_TLS"] = "tcp,self"  # on one host the kernel copies
    if plane == "nixl":
        importlib.import_module("nixl._api")
    with children() as start:
        lasting = start(live, plane, rounds)
        held = lasting.hear()
        for number in range(rounds):
            passing = start(live, plane, number)
            handle = passing.hear()
            assert asked(lasting, handle) == (number, number)
            assert asked(passing, held) == (rounds, rounds)
            passing.tell(held)  # killed in the middle of a read, perhaps
            passing.kill()
            assert asked(lasting, handle) == "gone"


# -- memory that processes of one host map from each other


def test_memory_that_is_read_again_is_mapped_once_unless_many_others_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader maps each memory of its publishers once, however often they reuse it in turn."""
    with HostPlane() as owner, HostPlane() as reader, ExitStack() as opened:
        exposed = [opened.enter_context(owner.expose(owner.empty(4096, mappable=True))) for _ in range(41)]
        again, last = exposed[:40], exposed[40]
        mapped = [[reader.map(region.handle, lasting=False) for region in again] for _ in range(3)]
        first, *others = [[each.data_ptr() for each in round_] for round_ in mapped]
        assert len(set(first)) == 40
        assert others == [first, first]
        monkeypatch.setattr(shareable_memory, "MOST_MAPPED", 40)
        reader.map(last.handle, lasting=False)
        kept = [reader.map(region.handle, lasting=False).data_ptr() for region in again[1:]]
        assert kept == first[1:]
        assert reader.map(again[0].handle, lasting=False).data_ptr() != first[0], "the oldest one was let go"


HUGE = 2 << 20


@given(
    nbytes=st.sampled_from([1, 4096, 4097, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 4097]),
    start=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    lasting=st.booleans(),
)
def test_any_part_of_any_memory_is_mapped_as_it_is(nbytes: int, start: float, lasting: bool) -> None:
    with HostPlane() as owner, HostPlane() as reader:
        memory = owner.empty(nbytes, mappable=True)
        assert memory.nbytes == nbytes
        memory.copy_((torch.arange(nbytes) * 31 >> 3).to(torch.uint8))
        part = memory[int(start * (nbytes - 1)) :]
        with owner.expose(part) as region:
            assert torch.equal(reader.map(region.handle, lasting=lasting), part)


def huge_bytes(tensor: torch.Tensor, field: str = "AnonHugePages") -> int:
    """The bytes on huge pages of the mapping that holds a tensor."""
    return int(smaps_field(tensor, field).split()[0]) << 10


# Huge pages -----------------------------------------------------------------------------------------------------------


@needs_huge_pages
def test_memory_that_is_moved_in_time_lies_on_huge_pages_and_keeps_what_it_holds() -> None:
    # In a mapping of its own: torch's may lie on the heap, of which numpy puts parts on huge pages, each a mapping.
    tensor = torch.frombuffer(mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.int32)
    torch.arange(16 << 20, dtype=torch.int32, out=tensor)
    before = huge_bytes(tensor)
    for nbytes in (0, 1, HUGE_PAGE - 1):
        assert put_on_huge_pages(tensor.data_ptr() + 1, nbytes, 1.0) == 0
    put_on_huge_pages(tensor.data_ptr(), tensor.nbytes, -1.0)
    assert huge_bytes(tensor) == before, "it had no time"
    eventually(lambda: put_on_huge_pages(tensor.data_ptr(), tensor.nbytes, 10.0) > 0)  # what is in use stays for now
    assert huge_bytes(tensor) > 0
    assert torch.equal(tensor, torch.arange(16 << 20, dtype=torch.int32))


def huge_share() -> float:
    """The share of this process's shareable memory on huge pages, as the kernel says."""
    pages = touched_pages(os.getpid())
    assert pages is not None
    return pages.huge / pages.nbytes


@needs_huge_pages
@pytest.mark.parametrize("plane", ["shm", "inproc"])
def test_shareable_memory_that_came_on_small_pages_moves_under_its_readers(
    plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shareable_memory, "_MOVE_SLACK", -1.0)
    with memory(plane) as opened:
        tensor = opened.empty(32 << 20, mappable=True)
        assert huge_share() < 0.5
        tensor.random_()
        wanted = tensor.clone()
        with opened.expose(tensor) as region:
            mapped = opened.map(region.handle, lasting=True)

            def improves() -> bool:
                opened.improve(tensor)
                return huge_share() > 0.9

            eventually(improves)
            assert torch.equal(tensor, wanted) and torch.equal(mapped, wanted)


def test_a_closed_plane_gives_and_moves_no_memory() -> None:
    opened = memory("shm")
    tensor = opened.empty(1 << 20, mappable=True)
    opened.close()
    for call in (lambda: opened.empty(64 << 20, mappable=True), lambda: opened.improve(tensor)):
        with pytest.raises(RegionGone, match="closed"):
            call()


@needs_huge_pages
def test_memory_on_huge_pages_is_mapped_with_few_faults() -> None:
    nbytes = 16 * HUGE
    with HostPlane() as owner, HostPlane() as reader:
        memory = owner.empty(nbytes, mappable=True)

        def lies_on_huge_pages() -> bool:
            put_on_huge_pages(memory.data_ptr(), nbytes, 1.0)  # the kernel may have had none free
            return huge_bytes(memory, "ShmemPmdMapped") == nbytes

        eventually(lies_on_huge_pages)
        with owner.expose(memory) as region:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            mapped = reader.map(region.handle, lasting=False)
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert huge_bytes(mapped, "ShmemPmdMapped") == nbytes
        assert faults < nbytes // (16 * 4096), "pages of 4 KiB come in sixteens"


@pytest.mark.parametrize("name", ["shm", "ucx", "nixl", "ucx over tcp", "nixl over tcp"], indirect=True)
def test_a_region_of_this_host_in_mappable_memory_is_mapped(
    name: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = start(_owner, name)
    other, _, handle = owner.hear()
    with memory(name) as plane:
        assert plane.can_map
        with pytest.raises(Unsupported, match="mapping"):
            plane.map(other, lasting=False)
        with monkeypatch.context() as elsewhere, pytest.raises(Unsupported, match="mapping"):
            elsewhere.setattr(host_plane, "this_host", lambda: "another")
            plane.map(handle, lasting=False)
        mapped = plane.map(handle, lasting=False)
        assert mapped.nbytes == handle.nbytes and mapped.unique().tolist() == [1]
        mapped[:10] = 7
        copy = torch.empty(handle.nbytes, dtype=torch.uint8)
        plane.read(handle, copy).wait()
        assert copy.unique().tolist() == [1], "what is written into a mapping stays in this process"
        lasting = plane.map(handle, lasting=True)
        assert asked(owner, "lent") is True, "the owner does not write to it anew"
        assert asked(owner, "close") == "closed"
        with pytest.raises(RegionGone):
            plane.map(handle, lasting=True)
        assert lasting.unique().tolist() == [1]
        del lasting
        assert asked(owner, "lent") is False
        owner.tell("end")
        owner.end()
        with pytest.raises(RegionGone):
            plane.map(handle, lasting=False)
