"""Communicators one after another: survivors keep what they have, newcomers find it, and nothing old arrives."""

from __future__ import annotations

import inspect
import mmap
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.shm.transport import BOARD_SLOTS, SharedSegment, ShmTransport, decode_address
from holdfast.backends.ucx import farewells, handshake
from holdfast.backends.ucx.endpoints import Connections, PeerLink
from holdfast.backends.ucx.farewells import Notice, parse
from holdfast.backends.ucx.libucp import UcxError
from holdfast.backends.ucx.transport import UcxTransport
from holdfast.comms import Communicator, CorruptData, HoldfastError, OpTimeout, PeerFailed, Revoked
from holdfast.comms.algorithms.shared_memory.board import layout_of
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.comms.transport.liveness import this_process
from holdfast.harness import LocalCluster
from support.comms.ranks import Test, as_test, running, second_tier
from support.waiting import eventually

SHM, UCX, UCX_TCP = ("shm", ""), ("ucx", "posix,cma,self"), ("ucx", "tcp,self")
over_ucx = pytest.mark.parametrize("cluster", [UCX, UCX_TCP], indirect=True, scope="module")
over_each = pytest.mark.parametrize("cluster", [SHM, UCX, *second_tier(UCX_TCP)], indirect=True, scope="module")
over_shm = pytest.mark.parametrize("cluster", [SHM], indirect=True, scope="module")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Four processes; ucx with shared memory, and with TCP, as its transports."""
    backend, tls = request.param
    with running(4, backend, timeout=60.0, environ={"UCX_TLS": tls} if tls else {}) as ranks:
        yield ranks


class Epochs:
    """One process, a rank of `outer`, in epoch after epoch; keeps its communicators. The store is in `folder`."""

    def __init__(self, outer: Communicator, folder: Path) -> None:
        self.me = outer.rank
        self.comm: Communicator | None = None
        self._backend, self._peers, self._folder = outer.backend, outer.peers, folder
        self._store = dist.FileStore(str(folder / "store"), -1)
        self._old: list[Communicator] = []
        self._barriers = 0

    def enter(
        self, epoch: int, processes: Sequence[int], *, alone: bool = False, anew: bool = False, timeout: float = 20.0
    ) -> Communicator:
        """Take part in an epoch as one of these processes, in this order; aborts the communicator before.

        `alone`: no other process sees the store. `anew`: the communicator gets nothing from the one before.
        """
        previous = self.comm or (self._old[-1] if self._old else None)
        if self.comm is not None:
            self.comm.abort("the epoch is over")
            self._old.append(self.comm)
            self.comm = None
        self._barriers = 0
        self.comm = connect_members(
            self._backend,
            KnownMembers(
                rank=list(processes).index(self.me),
                peers=[self._peers[process] for process in processes],
                store=dist.HashStore() if alone else dist.PrefixStore(str(epoch), self._store),
                epoch=epoch,
                previous=None if anew else previous,
                connect_payload=(epoch, self.me, -1, 0),  # as many as a board has room for
            ),
            timeout=timeout,
        )
        return self.comm

    def leave_barrier(self, comm: Communicator) -> None:
        """Enter a barrier, and return once all ranks have left it: a link that breaks then ends no op."""
        comm.barrier()
        self._barriers += 1
        self.meet(f"barrier {self._barriers} of epoch {comm.epoch}", comm.size)

    def meet(self, where: str, count: int) -> None:
        """Wait until so many processes are there, without a communicator."""
        at = self._folder / where
        at.mkdir(exist_ok=True)
        (at / str(self.me)).touch()
        eventually(lambda: len(list(at.iterdir())) == count)

    def close_old(self) -> None:
        """Close all communicators but the newest."""
        while self._old:
            self._old.pop(0).close()

    def close(self) -> None:
        self.close_old()
        if self.comm is not None:
            self.comm.close()


def on_processes(count: int) -> Callable[[Test], Test]:
    """A test of `body(epochs, ...)`, which the first `count` processes of the cluster call."""

    def decorate(body: Test) -> Test:
        def in_epochs(outer: Communicator, folder: Path, *more: Any) -> None:
            epochs = Epochs(outer, folder)
            try:
                if outer.rank < count:
                    body(epochs, *more)
            finally:
                outer.barrier()
                epochs.close()

        names = list(inspect.signature(body).parameters)[1:]

        def test(**fixtures: Any) -> None:
            fixtures["cluster"].run(in_epochs, fixtures["tmp_path"], *(fixtures[name] for name in names))

        return as_test(test, body, ["cluster", "tmp_path", *names])

    return decorate


def kept_by(comm: Communicator) -> object:
    """What the next communicator of a process may have from this one: its segment, or its worker."""
    if isinstance(comm.transport, ShmTransport):
        return comm.transport.segment
    assert isinstance(comm.transport, UcxTransport) and comm.transport.connections is not None
    return comm.transport.connections.worker


def total(comm: Communicator, count: int = 50_000) -> float:
    tensor = torch.full((count,), comm.rank + 1.0)
    comm.all_reduce(tensor)
    assert len(set(tensor.tolist())) == 1
    return float(tensor[0])


def restart(epochs: Epochs) -> None:
    """Let a process be as one that was started again: it has no worker any more."""
    assert epochs.comm is not None
    if isinstance(epochs.comm.transport, UcxTransport):
        given_up = epochs.comm.transport.hand_over([])
        assert given_up is not None
        given_up.close()


@dataclass(frozen=True)
class Epoch:
    """An epoch of these processes: one was `restarted` before it; it is never built if one is `absent`."""

    number: int
    processes: list[int]
    restarted: int | None = None
    absent: int | None = None


ALL = [0, 1, 2, 3]
STORIES: dict[str, tuple[list[Epoch], bool | None]] = {
    "two die": ([Epoch(1, ALL), Epoch(2, [0, 2, 3]), Epoch(3, [2, 3])], True),
    "survivors are numbered anew": ([Epoch(1, ALL), Epoch(2, [3, 0, 2]), Epoch(3, [0, 3])], True),
    "new at any rank": ([Epoch(1, [0, 1, 2]), Epoch(2, [0, 3, 2]), Epoch(3, [1, 3, 2])], None),
    "the first rank is new": ([Epoch(1, [1, 2, 3]), Epoch(2, ALL)], False),
    "one was left out": ([Epoch(1, [0, 1, 2]), Epoch(2, [0, 1]), Epoch(3, [0, 1, 2])], None),
    "one is restarted": ([Epoch(1, ALL), Epoch(2, ALL, restarted=3)], True),
    "one is restarted, one new": ([Epoch(1, [0, 1, 2]), Epoch(2, ALL, restarted=1)], None),
    "the first rank does not come": ([Epoch(1, ALL), Epoch(2, ALL, absent=0), Epoch(6, ALL)], True),
    "the last rank does not come": ([Epoch(1, ALL), Epoch(2, ALL, absent=3), Epoch(3, ALL)], True),
}
"""Epochs, and whether survivors keep their segment of shm: False if it is the first rank that does not know it."""


@over_each
@pytest.mark.parametrize("name", STORIES)
@on_processes(4)
def test_survivors_go_on_with_what_they_have_and_the_others_find_them(epochs: Epochs, name: str) -> None:
    """Those that know each other ask no store. Epoch 6 of shm has the slot of epoch 2, which was never built."""
    story, keeps = STORIES[name]
    before: object = None
    for epoch in story:
        if epochs.me not in epoch.processes:
            continue
        before = before if epochs.comm is None else kept_by(epochs.comm)
        if epoch.absent is not None:
            if epochs.me != epoch.absent:
                words = rf"rank\(s\) {epoch.absent}|connect" if isinstance(before, SharedSegment) else None
                with pytest.raises((OpTimeout, Revoked, PeerFailed), match=words):
                    epochs.enter(epoch.number, epoch.processes, timeout=0.5)
            epochs.meet("all have given up", len(epoch.processes))
            continue
        anew = epochs.me == epoch.restarted
        if anew:
            restart(epochs)
        alone = name == "survivors are numbered anew" and epoch.number > 1
        comm = epochs.enter(epoch.number, epoch.processes, anew=anew, alone=alone)
        assert comm.connect_payloads == [(epoch.number, process, -1, 0) for process in epoch.processes]
        sum_of_ranks = sum(range(1, comm.size + 1))
        assert [total(comm, count) for count in (3, 300_000)] == [sum_of_ranks] * 2
        kept = kept_by(comm)
        if isinstance(before, SharedSegment) and keeps is not None:
            assert isinstance(kept, SharedSegment)
            assert (kept.address.inode == before.address.inode if anew else kept is before) is keeps
        elif before is not None and not isinstance(before, SharedSegment):
            assert (kept is before) is not anew
        epochs.leave_barrier(comm)
        epochs.close_old()
        assert total(comm) == sum_of_ranks, "although the communicator before it is closed"
        epochs.leave_barrier(comm)


@over_each
@pytest.mark.parametrize("count", [3, 2_000_000])
@on_processes(2)
def test_no_epoch_receives_messages_of_an_earlier_one(epochs: Epochs, count: int) -> None:
    first = epochs.enter(1, [0, 1])
    if epochs.me == 0:
        work = first.send(torch.full((count,), 7.0), 1, async_op=True)
        with pytest.raises(HoldfastError):
            first.recv(torch.zeros(count), 1, tag=5, timeout=0.3)
        with suppress(HoldfastError):
            work.wait()
    second, tensor = epochs.enter(2, [0, 1]), torch.full((count,), 8.0)
    if epochs.me == 0:
        second.send(tensor, 1)
    else:
        second.recv(tensor.zero_(), 0)
        assert tensor[0] == 8


@over_shm
@on_processes(4)
def test_a_hundred_epochs_leave_no_bytes_and_no_descriptor(epochs: Epochs) -> None:
    epochs.enter(1, ALL)
    counts = []
    for epoch in range(2, 102):
        some = [rank for rank in range(4) if (epoch + rank) % 5]
        comm = epochs.enter(epoch, ALL if len(some) < 4 else some[::-1])
        assert [said[0] for said in comm.connect_payloads or ()] == [epoch] * 4
        assert total(comm, 10 if epoch % 3 else 70_000) == 10
        epochs.close_old()
        if epoch % 20 == 0:
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert max(counts) - min(counts) <= 3, "but for the pidfds of one communicator's peers"


@over_shm
@on_processes(4)
def test_an_announcement_ends_the_wait_of_one_rank_and_the_later_ops_of_all(epochs: Epochs) -> None:
    comm = epochs.enter(1, ALL)
    epochs.leave_barrier(comm)
    if epochs.me == 2:
        assert comm.announce(b"epoch 2", PeerFailed((3,), "it died"))
        with pytest.raises(PeerFailed, match=r"rank 3.*it died"):
            comm.barrier()
    if epochs.me:
        epochs.meet("announced", 3)  # rank 0 waits already, for a barrier in which rank 2 must have no part
    if epochs.me != 2:
        with pytest.raises(Revoked, match="rank 2 has announced what follows"):
            comm.barrier()
    word, after = comm.announced, epochs.enter(2, ALL)
    epochs.close_old()
    assert total(after) == 10
    assert (word, after.announced) == (None if epochs.me == 2 else b"epoch 2", None)


@over_shm
@on_processes(4)
def test_a_rank_that_announces_while_another_looks_is_not_taken_for_one_that_has_left(epochs: Epochs) -> None:
    comm: Any = epochs.enter(1, ALL)
    epochs.leave_barrier(comm)
    board = comm.transport._board
    look = board._announcer

    def look_too_early() -> int | None:
        found: int | None = look()
        epochs.meet("looked", 2)
        epochs.meet("announced", 2)
        return found

    if epochs.me == 0:
        board._announcer = look_too_early
        board.check_peers(lambda: [2])
    elif epochs.me == 2:
        epochs.meet("looked", 2)
        assert comm.announce(b"epoch 2", Revoked(1, "epoch 2 follows"))
        epochs.meet("announced", 2)


# -- a segment of shm


def test_the_segment_ends_with_the_last_of_its_board_slots_of_which_no_boards_share_one() -> None:
    peers = [this_process()] * 2
    segment = SharedSegment.make("test", peers)
    descriptor = segment.address.descriptor
    first, second = segment.take(1, peers), segment.take(2, peers)
    with pytest.raises(ValueError, match="earlier epoch"):
        segment.take(1 + BOARD_SLOTS, peers)
    assert not segment.has_room(1 + BOARD_SLOTS, 2)
    assert not segment.has_room(3, 3)
    assert segment.has_room(3, 2)
    first.release()
    segment.release_slot(1)
    assert segment.has_room(1 + BOARD_SLOTS, 2)
    second.release()
    segment.release_slot(2)
    assert not segment.has_room(3, 2)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_an_impossible_offer_is_corrupt_and_a_rank_maps_no_memory_of_another_job(tmp_path: Path) -> None:
    for said in (b"", b"7", b'[1,2,"x"]', b"\xff", b"[1,2]"):
        with pytest.raises(CorruptData, match="cannot be read"):
            decode_address(said)
    me = this_process()
    other = (tmp_path / "file").open("w+b")
    with other:
        inode = os.fstat(other.fileno()).st_ino
        with pytest.raises(PeerFailed, match="not the memory of this job"):
            SharedSegment.open(f"[{other.fileno()},{inode},2]".encode(), [me, me])
    with pytest.raises(PeerFailed, match="cannot be opened"):
        SharedSegment.open(b"[1000000,1,2]", [me, me])
    for rows in (1, 1_000_000):
        with pytest.raises(CorruptData, match="offers a board for"):
            SharedSegment.open(f"[0,1,{rows}]".encode(), [me, me])


def test_a_later_epoch_does_not_wait_for_memory() -> None:
    """All memory of its board but the stages is there before it begins."""
    segment = SharedSegment.make("ready", [this_process()] * 4)
    segment.prefault()
    layout = layout_of(4)
    pages = range(0, 8 * layout.stage, mmap.PAGESIZE)
    with segment.take(3, [this_process()] * 4) as slot:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for row in range(4):
            for page in pages:
                slot[8 * row * layout.row_words + page] = 1
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    segment.release_slot(3)
    assert faults < len(pages), f"{faults} faults, 4 rows of {len(pages)} pages each"


# -- endpoints of ucx


@over_ucx
@on_processes(2)
def test_endpoints_made_by_a_failed_attempt_close_with_the_last_communicator(epochs: Epochs) -> None:
    first = epochs.enter(1, [0, 1])
    epochs.leave_barrier(first)
    if epochs.me == 0:
        assert isinstance(first.transport, UcxTransport)
        restart(epochs)
        with pytest.raises(OpTimeout):
            epochs.enter(2, [0, 1], timeout=0.3)
        first.abort("again")
        first.close()
        assert first.transport.hand_over([]) is None


@over_ucx
@on_processes(2)
def test_a_malformed_notice_ends_the_epoch_and_a_later_farewell_is_heard(epochs: Epochs, tmp_path: Path) -> None:
    comm = epochs.enter(1, [0, 1])
    transport = comm.transport
    assert isinstance(transport, UcxTransport)
    if epochs.me == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(farewells, "WorkerFarewell", lambda aborted, why: {"type": "what nobody says"})
            transport.notices.send_farewell([transport.links[1].endpoint], True, "")
        transport.notices._said = False
        comm.abort("called off")
        (tmp_path / "said").touch()
        eventually((tmp_path / "heard").exists)  # a closing process drops what it could not send yet
        return
    eventually((tmp_path / "said").exists)  # no process sends a farewell to one that has left
    with pytest.raises(CorruptData, match="neither hello nor farewell"):
        comm.recv(torch.zeros(1), 0)

    def heard() -> bool:
        with transport._lock:
            transport._worker.progress()
            transport.notices.poll()
        return 0 in transport.notices.left

    eventually(heard)
    (tmp_path / "heard").touch()
    assert "called off" in transport.notices.left[0][0].why


@given(st.binary(max_size=64))
def test_a_malformed_notice_is_refused(text: bytes) -> None:
    with suppress(CorruptData):
        assert isinstance(parse(text), Notice)


@over_ucx
@on_processes(2)
def test_a_process_survives_a_peer_that_connects_and_dies_before_it_is_heard(epochs: Epochs, tmp_path: Path) -> None:
    """UCX 1.22 ends a process when a peer without its shared memory asks it to connect."""
    gone = tmp_path / "gone"

    def leave(connections: Connections, address: bytes) -> PeerLink:
        link = Connections.link(connections, address)
        connections.worker.flush([link.endpoint], seconds=0.2)
        raise UcxError("leaving", -3, "of its own accord")

    look = handshake._Handshake._exchange_addresses

    def look_late(self: handshake._Handshake) -> bool:
        if self._published:
            return look(self)
        self._published = True
        self._context.store.set("ucx/0", self._worker.address.hex())
        eventually(gone.exists)
        return False

    with pytest.MonkeyPatch.context() as patch:
        if epochs.me == 0:
            patch.setattr(handshake._Handshake, "_exchange_addresses", look_late)
        else:
            patch.setattr(handshake, "Connections", type("Leaving", (Connections,), {"link": leave}))
        with pytest.raises((PeerFailed, OpTimeout)):
            epochs.enter(1, [0, 1], timeout=1.0)
    gone.touch()
