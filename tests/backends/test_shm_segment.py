"""Communicators of shm, one after another on the same segment: ranks find it, and epochs stay apart."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.backends.shm.transport import BOARD_SLOTS, SharedSegment, ShmTransport, decode_address
from holdfast.comms import Communicator
from holdfast.comms.algorithms.shared_memory.board import layout_of
from holdfast.comms.errors import CorruptData, PeerFailed, Revoked
from holdfast.comms.transport.liveness import this_process
from holdfast.harness import LocalCluster
from support.meeting import Epochs


@pytest.fixture(scope="module")
def four() -> Iterator[LocalCluster]:
    with LocalCluster(4, "shm", timeout=60.0) as cluster:
        yield cluster


def segment_of(comm: Communicator) -> SharedSegment:
    assert isinstance(comm.transport, ShmTransport)
    return comm.transport.segment


def total(comm: Communicator, count: int = 50_000) -> float:
    tensor = torch.full((count,), comm.rank + 1.0)
    comm.all_reduce(tensor)
    assert len(set(tensor.tolist())) == 1
    return float(tensor[0])


def sum_of(size: int) -> float:
    return size * (size + 1) / 2


def test_survivors_keep_their_board_slot(four: LocalCluster, tmp_path: Path) -> None:
    def run(outer: Communicator) -> tuple[list[bool], list[float]]:
        epochs = Epochs("shm", outer, tmp_path)
        comm = epochs.next(1, [0, 1, 2, 3], None)
        kept, sums = [], [total(comm)]
        for epoch, ranks in ((2, [0, 2, 3]), (3, [2, 3])):
            if outer.rank in ranks:
                before = comm
                comm = epochs.next(epoch, ranks, before)
                kept.append(segment_of(comm) is segment_of(before))
                before.close()
                sums.append(total(comm))
        comm.close()
        outer.barrier()
        return kept, sums

    results = four.run(run)
    assert results[0] == ([True], [10.0, 6.0])
    assert results[1] == ([], [10.0])
    assert results[2] == results[3] == ([True, True], [10.0, 6.0, 3.0])


def test_a_new_rank_finds_the_segment_of_the_survivors_at_any_rank(four: LocalCluster, tmp_path: Path) -> None:
    def run(outer: Communicator) -> list[float]:
        epochs, sums = Epochs("shm", outer, tmp_path), []
        comm = epochs.next(1, [0, 1, 2], None) if outer.rank < 3 else None
        for epoch, ranks in ((2, [0, 3, 2]), (3, [1, 3, 2])):
            if outer.rank in ranks:
                before, comm = comm, epochs.next(epoch, ranks, comm)
                sums.append(total(comm))
                if before is not None:
                    before.close()
        if comm is not None:
            comm.close()
        outer.barrier()
        return sums

    assert four.run(run) == [[6.0], [6.0], [6.0, 6.0], [6.0, 6.0]]


def test_ranks_that_guessed_the_wrong_slot_come_to_that_of_rank_0(four: LocalCluster, tmp_path: Path) -> None:
    """Ranks 1 to 3 have kept their segment; rank 0 has not, and makes a new one."""

    def run(outer: Communicator) -> tuple[bool, float]:
        epochs = Epochs("shm", outer, tmp_path)
        before = epochs.next(1, [1, 2, 3], None) if outer.rank else None
        comm = epochs.next(2, [0, 1, 2, 3], None if before is None else before)
        moved = before is None or segment_of(comm) is not segment_of(before)
        result = total(comm)
        for each in (before, comm):
            if each is not None:
                each.close()
        outer.barrier()
        return moved, result

    assert four.run(run) == [(True, 10.0)] * 4


def test_rank_0_tells_a_rank_without_the_segment_where_it_is(four: LocalCluster, tmp_path: Path) -> None:
    """All ranks know each other, so rank 0 does not offer its segment unasked; rank 3 has lost it."""

    def run(outer: Communicator) -> tuple[bool, float]:
        epochs = Epochs("shm", outer, tmp_path)
        before = epochs.next(1, [0, 1, 2, 3], None)
        comm = epochs.next(2, [0, 1, 2, 3], None if outer.rank == 3 else before)
        same = segment_of(comm).address.inode == segment_of(before).address.inode
        result = total(comm)
        before.close()
        after = total(comm)
        comm.close()
        outer.barrier()
        return same, result + after

    assert four.run(run) == [(True, 20.0)] * 4


def test_a_hundred_epochs_leave_no_bytes_and_no_descriptor(four: LocalCluster, tmp_path: Path) -> None:
    def run(outer: Communicator) -> tuple[int, list[tuple[int, ...]]]:
        epochs = Epochs("shm", outer, tmp_path)
        comm = epochs.next(1, [0, 1, 2, 3], None)
        before, counts = comm, []
        for epoch in range(2, 102):
            ranks = [rank for rank in range(4) if (epoch + rank) % 5]
            members = [0, 1, 2, 3] if len(ranks) < 4 else ranks[::-1]
            comm = epochs.next(epoch, members, before, connect_payload=(epoch, -comm.rank))
            assert comm.connect_payloads is not None
            assert all(said[0] == epoch for said in comm.connect_payloads)
            assert total(comm, 10 if epoch % 3 else 70_000) == sum_of(4)
            before.close()
            before = comm
            if epoch % 20 == 0:
                counts.append(len(list(Path("/proc/self/fd").iterdir())))
        comm.close()
        outer.barrier()
        return max(counts) - min(counts), [tuple(said) for said in comm.connect_payloads or ()]

    for spread, _ in four.run(run):
        assert spread <= 3, "but for the pidfds of one communicator's peers, if it has had to look at them"


def test_the_next_epoch_steps_over_one_that_was_never_built(four: LocalCluster, tmp_path: Path) -> None:
    """Epoch 2 is given up, as a rank does not come; epoch 6 has the same slot."""

    def run(outer: Communicator) -> float:
        epochs = Epochs("shm", outer, tmp_path)
        first = epochs.next(1, [0, 1, 2, 3], None)
        if outer.rank:
            with pytest.raises(Exception, match=r"rank\(s\) 0|connect"):
                epochs.next(2, [0, 1, 2, 3], first, timeout=0.3)
        outer.barrier()
        comm = epochs.next(6, [0, 1, 2, 3], first)
        result = total(comm)
        first.close()
        comm.close()
        outer.barrier()
        return result

    assert four.run(run) == [10.0] * 4


# What a segment is ---------------------------------------------------------------------------------------------------


def a_segment(rows: int = 2) -> tuple[SharedSegment, Any]:
    peers = [this_process()] * rows
    return SharedSegment.make("test", peers), peers


def test_the_segment_ends_with_the_last_of_its_board_slots() -> None:
    segment, peers = a_segment()
    descriptor = segment.address.descriptor
    first, second = segment.take(1, peers), segment.take(2, peers)
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


def test_two_boards_never_share_a_slot() -> None:
    segment, peers = a_segment()
    slot = segment.take(1, peers)
    with pytest.raises(ValueError, match="earlier epoch"):
        segment.take(1 + BOARD_SLOTS, peers)
    slot.release()
    segment.release_slot(1)


@pytest.mark.parametrize("said", [b"", b"7", b'[1,2,"x"]', b"\xff", b"[1,2]"])
def test_an_offer_of_an_impossible_slot_is_corrupt(said: bytes) -> None:
    with pytest.raises(CorruptData, match="cannot be read"):
        decode_address(said)


def test_a_rank_maps_no_memory_of_another_job(tmp_path: Path) -> None:
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


def test_an_announcement_is_left_on_the_board_where_others_wait(four: LocalCluster, tmp_path: Path) -> None:
    def run(outer: Communicator) -> tuple[bytes | None, float]:
        epochs = Epochs("shm", outer, tmp_path)
        comm = epochs.next(1, [0, 1, 2, 3], None)
        if outer.rank == 2:
            assert comm.announce(b"epoch 2")
        else:
            with pytest.raises(Revoked, match="rank 2 has announced what follows"):
                comm.barrier()
        word = comm.announced
        after = epochs.next(2, [0, 1, 2, 3], comm)
        comm.close()
        found = total(after)
        assert after.announced is None
        after.close()
        outer.barrier()
        return word, found

    assert four.run(run) == [(None if rank == 2 else b"epoch 2", 10.0) for rank in range(4)]
