"""Point to point over `torch.distributed`: receives from any source, timeouts, connections, the end of a group, and
matching."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from holdfast import comms
from holdfast.comms import Communicator, Mismatch, OpTimeout, PeerFailed, Revoked, StillRunning
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.comms.torchdist import Options, p2p_channels
from holdfast.comms.torchdist.message_matcher import Header, MessageMatcher, PendingRecv
from holdfast.comms.torchdist.p2p_channels import P2PChannels
from holdfast.comms.torchdist.works import TorchWork
from holdfast.comms.transport.liveness import is_gone
from support.comms.ranks import on_ranks, second_tier
from support.comms.torch_groups import ENVIRON, default_group, on_each_rank_of, shared_groups
from support.waiting import PATIENCE, eventually

BACKENDS = ["shm", "gloo", *second_tier("ucx")]
three = shared_groups(3, *BACKENDS)


@on_each_rank_of("three")
def test_a_receive_after_an_any_source_receive_may_have_another_shape(rank: int, size: int) -> None:
    """While the second any-source receive is pending, the channel from rank 1 waits for messages, too."""
    for sender in (1, 2):
        if rank == 0:
            got = torch.empty(1)
            assert dist.recv(got) == sender and got.item() == sender
        if rank == sender:
            dist.send(torch.tensor([float(rank)]), 0)
        dist.barrier()
    if rank == 1:
        dist.send(torch.arange(300_000), 0)
        dist.send(torch.tensor([7.0]), 0)
    if rank == 0:
        got, after = torch.empty(300_000, dtype=torch.int64), torch.empty(1)
        dist.recv(got, src=1)
        assert dist.recv(after) == 1
        assert torch.equal(got, torch.arange(300_000)) and after.item() == 7
    dist.barrier()  # a possible sender must not leave while another rank receives from any source


@on_each_rank_of("three")
def test_concurrent_any_source_receives_get_one_message_each(rank: int, size: int) -> None:
    sys.setswitchinterval(1e-6)  # provokes more races of threads
    for _ in range(10):
        if rank == 0:
            got = [torch.full((1,), -1.0) for _ in range(4)]
            for work in [dist.irecv(each) for each in got]:
                work.wait()
            assert sorted(each.item() for each in got) == [10, 11, 20, 21]
        else:
            for work in [dist.isend(torch.tensor([10.0 * rank + i]), 0) for i in range(2)]:
                work.wait()
        dist.barrier()
    sys.setswitchinterval(0.005)


@pytest.mark.parametrize("met", [True, False])
@on_each_rank_of("three")
def test_pending_receives_end_with_the_group(rank: int, size: int, met: bool) -> None:
    group = dist.new_group()
    if rank == 0:
        if met:
            dist.recv(torch.empty(1), src=1, group=group)
        pending = dist.irecv(torch.empty(1), src=1, group=group)
        time.sleep(0.1)  # until its thread waits for rank 1; there is no event for that
        began = time.monotonic()
        dist.destroy_process_group(group)
        assert time.monotonic() - began < PATIENCE
        with pytest.raises(Revoked):
            pending.wait()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-p2p-")]
    elif rank == 1 and met:
        dist.send(torch.ones(1), 0, group=group)
    dist.barrier()


@on_each_rank_of("three")
def test_many_tags_use_no_more_descriptors_and_threads_than_one(rank: int, size: int) -> None:
    def exchange(tags: Sequence[int]) -> None:
        """Ranks 0 and 1 send each other a message of each tag, and receive them in the opposite order."""
        peer = 1 - rank
        works = [dist.isend(torch.tensor([tag]), peer, tag=tag) for tag in tags]
        got = {tag: torch.zeros(1, dtype=torch.int64) for tag in reversed(tags)}
        works += [dist.irecv(tensor, peer, tag=tag) for tag, tensor in got.items()]
        for work in works:
            work.wait()
        assert [tensor.item() for tensor in got.values()] == list(got)

    if rank < 2:
        exchange([0])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
        threads = threading.active_count()
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 8, limits[1]))
        try:
            exchange(range(200))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert threading.active_count() <= threads
    dist.barrier()


@pytest.mark.parametrize("met", [True, False], ids=["connected", "not connected"])
@on_ranks(2, *BACKENDS, killed=(1,), environ=ENVIRON)
def test_a_dead_peer_ends_sends_and_receives_at_once(comm: Communicator, met: bool, tmp_path: Path) -> None:
    """The ops' timeout is 60 seconds."""
    with default_group(comm, tmp_path, pg_options=Options(comm.backend)):
        one, much = torch.ones(1), torch.ones(1_000_000)
        if met:
            for work in [dist.isend(one, 1 - comm.rank), dist.irecv(torch.ones(1), 1 - comm.rank)]:
                work.wait()
        dist.barrier()
        if comm.rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        pending = [dist.irecv(one, 1), dist.irecv(one, 1, tag=5), dist.isend(much, 1, tag=6), dist.irecv(one)]
        for work in pending:
            with pytest.raises(PeerFailed, match="rank 1"):
                work.wait()
        assert time.monotonic() - began < PATIENCE


@on_ranks(3, *BACKENDS, killed=(0,), environ=ENVIRON)
def test_a_living_pair_exchanges_its_first_message_after_the_stores_process_died(
    comm: Communicator, port: int, tmp_path: Path
) -> None:
    """Rank 0 serves torch's store."""
    place, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=20)
    with default_group(comm, tmp_path, init_method=place, timeout=limit, pg_options=Options(comm.backend)):
        dist.barrier()
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        eventually(lambda: is_gone(comm.peers[0]))
        peer, got = 3 - comm.rank, torch.zeros(1)
        for work in [dist.isend(torch.tensor([float(comm.rank)]), peer), dist.irecv(got, peer)]:
            work.wait()
        assert got.item() == peer
        with pytest.raises(PeerFailed, match="rank 0"):
            dist.recv(torch.zeros(1), 0)
        for needs_the_store in (dist.monitored_barrier, lambda: dist.new_group([1, 2])):
            with pytest.raises(PeerFailed, match="the store at"):
                needs_the_store()


# -- the ends of a channel, both in this process: receives that get no message, and connections that take long, or fail


Ends = tuple[P2PChannels, P2PChannels]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The channels of ranks 0 and 1."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as both:
        pair = list(both.map(lambda rank: comms.connect("inproc", rank=rank, size=2, rendezvous=store), (0, 1)))
        first, second = both.map(lambda comm: P2PChannels(comm, PATIENCE), pair)
        yield first, second
        for each in (first, second, *pair):
            each.close()


def test_a_receive_of_another_size_or_dtype_is_an_error_and_the_next_message_arrives(ends: Ends) -> None:
    sender, receiver = ends
    for sent, taken in (
        (torch.ones(2), torch.ones(5)),
        (torch.ones(300_000), torch.ones(2)),
        (torch.ones(2), torch.ones(2, dtype=torch.int32)),
    ):
        works, after = [sender.send(each, 1, 0, PATIENCE) for each in (sent, torch.tensor([3.0]))], torch.zeros(1)
        with pytest.raises(Mismatch, match=f"rank 0 sent {sent.nbytes} bytes of {sent.dtype} under tag 0"):
            receiver.recv(taken, 0, 0, PATIENCE).wait()
        for work in (receiver.recv(after, 0, 0, PATIENCE), *works):
            work.wait()
        assert after.item() == 3


def test_a_receive_into_a_tensor_that_cannot_hold_a_message_takes_none(ends: Ends) -> None:
    sender, receiver = ends
    sent, got = sender.send(torch.ones(4), 1, 0, PATIENCE), torch.zeros(4)
    for source in (0, None):
        for refused, why in ((torch.zeros(1).expand(4), "share memory"), (torch.zeros(4, device="meta"), "is on meta")):
            with pytest.raises(ValueError, match=why):
                receiver.recv(refused, source, 0, PATIENCE)
    receiver.recv(got, 0, 0, PATIENCE).wait()
    sent.wait()
    assert got.eq(1).all()


def test_a_receive_times_out_by_itself_and_leaves_the_channel_as_it_was(ends: Ends) -> None:
    """On a new channel, and again after a receive from any rank."""
    sender, receiver = ends
    for source in (0, None, 0):
        got = torch.zeros(1)
        with pytest.raises(OpTimeout, match="rank 0"):
            receiver.recv(got, 0, 0, 0.05).wait()
        sent = sender.send(torch.ones(1), 1, 0, PATIENCE)
        receiver.recv(got, source, 0, PATIENCE).wait()
        sent.wait()
        assert got.item() == 1


def test_a_send_times_out_by_itself_while_its_peer_connects_and_leaves_the_channel_as_it_was(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer has come to the channel, and is stopped before it connects."""
    goes_on = threading.Event()

    def connect(backend: str, members: KnownMembers, **options: Any) -> Communicator:
        assert members.rank == 0 or goes_on.wait(PATIENCE)
        return connect_members(backend, members, **options)

    monkeypatch.setattr(p2p_channels, "connect_members", connect)
    (sender, receiver), got = ends, torch.zeros(1)
    received = receiver.recv(got, 0, 0, PATIENCE)
    late = [sender.send(torch.tensor([1.0]), 1, 0, 0.5) for _ in range(2)]
    for work in late:
        with pytest.raises(OpTimeout, match=r"send .* timed out after 0.5 s waiting for rank 1"):
            work.wait()
    goes_on.set()
    sender.send(torch.tensor([2.0]), 1, 0, PATIENCE).wait()
    received.wait()
    assert got.item() == 2, "the others were not sent"


def test_a_channel_that_cannot_be_connected_fails_all_its_messages(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ends have met in vain, and each attempt needs keys of its own: another would wait for nobody."""
    attempts = []

    def connect(backend: str, members: KnownMembers, **options: Any) -> Communicator:
        attempts.append(members.rank)
        raise OpTimeout("connect", 0, 60.0, (1 - members.rank,))

    monkeypatch.setattr(p2p_channels, "connect_members", connect)
    sender, receiver = ends
    received = receiver.recv(torch.zeros(1), 0, 0, PATIENCE)
    for _ in range(3):
        with pytest.raises(OpTimeout, match=r"send .* timed out after 60 s waiting for rank 1"):
            sender.send(torch.ones(1), 1, 0, PATIENCE).wait()
    with pytest.raises(OpTimeout, match=r"recv .* timed out after 60 s waiting for rank 0"):
        received.wait()
    assert sorted(attempts) == [0, 1]


# -- how messages are matched to their receives, whichever come first


SENDERS, TAGS = (0, 1), (0, 1, 2)


def arrive(matcher: MessageMatcher, src: int, tag: int, number: int) -> None:
    """Deliver a message as a channel's thread does."""
    payload = torch.tensor([number])
    header = Header(tag, payload.nbytes, payload.dtype)
    expected = matcher.claim(src, header)
    if expected is None:
        matcher.keep(src, header, payload.view(torch.uint8))
    else:
        expected.take(src, header, payload.view(torch.uint8))


def expect(matcher: MessageMatcher, src: int | None, tag: int, timeout: float = 60.0) -> PendingRecv:
    return matcher.expect(torch.zeros(1, dtype=torch.int64), src, tag, timeout)


events = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from(SENDERS), st.sampled_from(TAGS)),
        st.tuples(st.just("recv"), st.sampled_from((*SENDERS, None)), st.sampled_from(TAGS)),
    )
)


@given(events)
def test_messages_of_one_sender_and_tag_arrive_in_order_and_none_twice(given: list[tuple[str, int, int]]) -> None:
    matcher, receives, sent = MessageMatcher(3), [], 0
    for kind, rank, tag in given:
        if kind == "send":
            arrive(matcher, rank, tag, 1000 * rank + 100 * tag + sent)
            sent += 1
        else:
            receives.append((rank, tag, expect(matcher, rank, tag)))
    received = [(src, tag, int(each.tensor)) for src, tag, each in receives if each.done()]
    assert len({number for _, _, number in received}) == len(received)
    for src, tag, number in received:
        assert number // 100 % 10 == tag and src in (None, number // 1000)
    for src in SENDERS:
        for tag in TAGS:
            named = [number for src_, tag_, number in received if (src_, tag_) == (src, tag)]
            assert named == sorted(named)
    waiting = [(src, tag) for src, tag, each in receives if not each.done()]
    assert not any(matcher._kept.get((rank, tag)) for src, tag in waiting for rank in SENDERS if src in (rank, None))


def test_a_receive_expires_unless_its_message_has_begun_to_arrive() -> None:
    matcher = MessageMatcher(2)
    late, begun = expect(matcher, 1, 0, 0.01), expect(matcher, 1, 1, 0.05)
    assert matcher.claim(1, Header(1, begun.tensor.nbytes, begun.tensor.dtype)) is begun
    with pytest.raises(OpTimeout, match="rank 1"):
        late.wait()
    with pytest.raises(TimeoutError, match="goes on"):
        begun.wait(0.1)
    begun.run(lambda: None)
    begun.wait()


def test_nothing_more_comes_from_a_dead_sender_but_what_was_kept() -> None:
    matcher = MessageMatcher(2)
    arrive(matcher, 1, 0, 7)
    pending = expect(matcher, 1, 3)
    matcher.fail(1, PeerFailed((1,), "gone"))
    with pytest.raises(PeerFailed):
        pending.wait()
    assert int(expect(matcher, 1, 0).tensor) == 7
    with pytest.raises(PeerFailed):
        expect(matcher, 1, 0)


def test_a_wait_lasts_no_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs as fast as the receive waits: what counts is the sum of all its waits."""
    waits: list[float] = []

    class Never(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            clock[0] += timeout or 0.0
            return False

    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    matcher = MessageMatcher(2)
    pending = expect(matcher, 0, 3, timeout=60.0)
    pending._done = Never()
    for timeout in (2.0, 0.0, 5.0):
        waits.clear()
        with pytest.raises(StillRunning, match=f"after {timeout:g} s"):
            pending.wait(timeout)
        assert sum(waits) == pytest.approx(timeout)
    both = TorchWork([pending, expect(matcher, 1, 3)], [], 60.0, 0)
    waits.clear()
    with pytest.raises(StillRunning):
        both.wait(timedelta(seconds=7))
    assert sum(waits) == pytest.approx(7.0)
