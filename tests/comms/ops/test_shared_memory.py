"""Ops over a board: messages in all interleavings of their steps, also with the end of a rank; large ops in both copy
modes."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.comms import Communicator, OpTimeout, PeerFailed, ReduceOp, Revoked, _native
from holdfast.comms.algorithms.shared_memory import channels
from holdfast.comms.algorithms.shared_memory.board import (
    ABORTED,
    CLOSED,
    EPOCH,
    IN_PLACE_BITS,
    NEAR,
    REPLACED,
    STATE,
    UNSTAGED,
    Board,
    layout_of,
)
from holdfast.comms.algorithms.shared_memory.channels import Channels
from holdfast.comms.algorithms.shared_memory.direct import DirectTransport
from holdfast.comms.errors import Mismatch
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import this_process
from holdfast.harness import LocalCluster
from support.comms.collectives import COLLECTIVES, collective
from support.comms.meeting import soon
from support.comms.ranks import on_ranks, on_ranks_of, running, second_tier, shared_ranks
from support.waiting import PATIENCE

SENDER, RECEIVER = 0, 1
ALL_CLASSES = (1 << 32) - 1
"""The IN_PLACE_BITS of a rank that prefers to read the inputs of every large op in place."""


def board_of(comm: Communicator) -> Board:
    """The board under a communicator of `shm` or `inproc`."""
    transport = comm._transport
    assert isinstance(transport, DirectTransport)
    return transport._board


class Schedules:
    """Runs a program once for each possible sequence of results of `choose`."""

    def __init__(self) -> None:
        self.runs = 0
        self._plan: list[int] = []
        self._made: list[tuple[int, int]] = []

    def choose(self, options: int) -> int:
        """Choose a number below `options`."""
        at = len(self._made)
        choice = self._plan[at] if at < len(self._plan) else 0
        self._made.append((choice, options))
        return choice

    def explore(self, program: Callable[[], None]) -> None:
        while True:
            self._made = []
            self.runs += 1
            program()
            while self._made and self._made[-1][0] + 1 == self._made[-1][1]:
                self._made.pop()
            if not self._made:
                return
            self._plan = [choice for choice, _ in self._made]
            self._plan[-1] += 1


View = dict[int, int]
"""For each word, the number of the first store that a thread can still read."""
Stores = defaultdict[int, list[tuple[int, View]]]
"""For each word, the values that were stored, and what the storing thread knew of."""


class ThreadWords:
    """One thread's words, in place of `_native.Words`, in the memory of weakly ordered processors.

    A load may return any store to its word that is not older than one which the thread knows of. A thread knows of its
    own stores, of what it has read, and, after an acquiring load of a releasing store, of all that the storing thread
    knew of. Every access is an acquire or a release, if they are `ordered`.
    """

    def __init__(self, stores: Stores, schedules: Schedules, ordered: bool) -> None:
        self._stores, self._schedules, self._ordered, self._view = stores, schedules, ordered, View()

    def __getitem__(self, word: int) -> int:
        stores, view = self._stores[word], self._view
        first = view.get(word, 0)
        last = len(stores) - 1
        number = last - (self._schedules.choose(last - first + 1) if last > first else 0)
        value, known = stores[number]
        view[word] = number
        if self._ordered:
            for other, least in known.items():
                view[other] = max(view.get(other, 0), least)
        return value

    def __setitem__(self, word: int, value: int) -> None:
        self._view[word] = len(self._stores[word])
        self._stores[word].append((value, dict(self._view)))


class ModelBoard:
    """The part of a board that `Channels` uses."""

    size = 2

    def __init__(self, rank: int, words: ThreadWords) -> None:
        self.rank, self.words, self.native = rank, words, self

    def entry(self, src: int, dst: int, number: int) -> int:
        return 8 * number

    def wake(self, rank: int) -> None:
        """Do nothing: no rank sleeps."""

    def check_source(self, rank: int) -> None:
        """Do nothing: no rank aborts."""


def run_once(schedules: Schedules, tags: Sequence[int], wanted: Sequence[int], ordered: bool = True) -> None:
    """Send a message of each tag, and receive the wanted ones, under one schedule.

    The sender posts at any time between two receives; loads that see less than that stand for later times.
    """
    stores: Stores = defaultdict(lambda: [(0, {})])
    into = torch.zeros(channels.INLINE_BYTES + 1, dtype=torch.uint8)
    messages = [(torch.empty_like(into), RECEIVER, tag) for tag in tags]
    numbers = {tensor.data_ptr(): number for number, (tensor, _, _) in enumerate(messages)}
    taken: list[int] = []
    boards: list[Any] = [ModelBoard(rank, ThreadWords(stores, schedules, ordered)) for rank in (SENDER, RECEIVER)]
    sender = Channels(boards[SENDER], lambda *message: None)
    receiver = Channels(boards[RECEIVER], lambda rank, address, into, nbytes: taken.append(numbers[address]))
    posted = 0
    for tag in wanted:
        while posted < len(messages) and schedules.choose(2) and sender._post(messages[posted]) is not None:
            posted += 1
        if not receiver._take((into, SENDER, tag)):
            return  # the receiver would poll again: equal to a schedule with an earlier sender
    for tag in set(wanted):
        got = [number for number in taken if tags[number] == tag]
        assert got == [number for number, each in enumerate(tags) if each == tag][: len(got)], f"{taken} of {tags}"
    assert [tags[number] for number in taken] == list(wanted)


@pytest.mark.parametrize(
    ("entries", "tags", "wanted"),
    [
        (2, (7, 7, 7, 7), (7, 7, 7, 7)),
        (3, (7, 7, 7, 7), (7, 7, 7, 7)),
        (3, (7, 9, 7, 9), (9, 7, 7, 9)),
        (3, (9, 7, 7, 7), (7, 7, 7, 9)),
    ],
)
def test_no_order_of_loads_and_stores_lets_messages_overtake_each_other(
    entries: int, tags: tuple[int, ...], wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "CHANNEL_ENTRIES", entries)
    schedules = Schedules()
    schedules.explore(lambda: run_once(schedules, tags, wanted))
    assert schedules.runs > 100


def test_the_exploration_finds_what_accesses_without_order_and_a_single_scan_do_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "CHANNEL_ENTRIES", 3)
    schedules, scan = Schedules(), Channels._scan
    with pytest.raises((AssertionError, KeyError, Mismatch)):
        schedules.explore(lambda: run_once(schedules, (7, 7, 7), (7, 7, 7), ordered=False))
    schedules = Schedules()
    monkeypatch.setattr(Channels, "_scan", lambda self, src, tag, whole=True: not whole or scan(self, src, tag))
    with pytest.raises(AssertionError, match="of"):
        schedules.explore(lambda: run_once(schedules, (7, 7, 7), (7, 7, 7)))


class Interleaved(Board):
    """A board on which other ranks get on while this one is about to look at its peers; `meanwhile` is run once."""

    meanwhile: Callable[[], object] | None = None

    def check_peers(self, missing: Callable[[], Sequence[int]]) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        super().check_peers(missing)


def boards_of_two(
    epoch: int = 0, memory: mmap.mmap | None = None, entered: bool = True
) -> tuple[Interleaved, Interleaved]:
    memory = memory or mmap.mmap(-1, layout_of(2).nbytes)
    peers, device, deadline = (this_process(),) * 2, torch.device("cpu"), soon()
    sender, receiver = (
        Interleaved(memory, Context(rank, 2, "two", epoch, device, dist.HashStore(), peers, deadline), dead=tuple)
        for rank in (SENDER, RECEIVER)
    )
    for board in (sender, receiver) if entered else ():
        board.enter(3, ())
    return sender, receiver


def copy(rank: int, address: int, into: int, nbytes: int) -> None:
    ctypes.memmove(into, address, nbytes)


LONG, SHORT = channels.INLINE_BYTES // 4 + 1, 4
"""Elements of a message that the receiver reads from the sender's tensor, and of one that lies on the board."""


def test_a_message_whose_sender_has_given_up_is_not_received() -> None:
    """Nobody takes it in time, so its sender aborts, and may use its memory again."""
    sender, receiver = boards_of_two()
    message, into = torch.ones(LONG), torch.zeros(LONG)
    with pytest.raises(OpTimeout):
        Channels(sender, copy).run([(message, RECEIVER, 0)], [], time.monotonic(), "send")
    sender.leave(ABORTED, b"the send timed out")
    message.fill_(7)
    with pytest.raises(Revoked, match="rank 0 aborted: the send timed out"):
        Channels(receiver, copy).run([], [(into, SENDER, 0)], soon(), "recv")
    assert into.eq(0).all(), "nothing was read: the memory may be gone"


@pytest.mark.parametrize("readable", [True, False])
def test_a_message_whose_sender_gives_up_while_it_is_read_is_not_received(readable: bool) -> None:
    sender, receiver = boards_of_two()
    message = torch.ones(LONG)
    assert Channels(sender, copy)._post((message, RECEIVER, 0))

    def read(rank: int, address: int, into: int, nbytes: int) -> None:
        sender.leave(ABORTED, b"the send timed out")
        if not readable:
            raise PeerFailed((rank,), "its memory is gone")

    with pytest.raises(Revoked, match="rank 0 aborted: the send timed out"):
        Channels(receiver, read).run([], [(torch.zeros(LONG), SENDER, 0)], soon(), "recv")


def test_a_message_that_was_sent_before_its_sender_aborted_is_received() -> None:
    """A short one has left the sender's memory when `send` returns."""
    sender, receiver = boards_of_two()
    message, into = torch.ones(SHORT), torch.zeros(SHORT)
    Channels(sender, copy).run([(message, RECEIVER, 0)], [], soon(), "send")
    sender.leave(ABORTED, b"another op failed")
    message.fill_(7)
    Channels(receiver, copy).run([], [(into, SENDER, 0)], soon(), "recv")
    assert into.eq(1).all()


@pytest.mark.parametrize(("first", "count"), [(SENDER, SHORT), (RECEIVER, LONG)])
def test_a_message_that_came_before_its_sender_or_its_receiver_closed_is_passed_at_any_moment(
    first: int, count: int
) -> None:
    boards, into = boards_of_two(), torch.zeros(count)
    source, target = (Channels(board, copy) for board in boards)
    acts = [
        lambda: source.run([(torch.ones(count), RECEIVER, 0)], [], soon(), "send"),
        lambda: target.run([], [(into, SENDER, 0)], soon(), "recv"),
    ]
    later, act_later = boards[1 - first], acts[1 - first]
    later.meanwhile = lambda: (acts[first](), boards[first].leave(CLOSED, b"closed"))
    act_later()
    assert into.eq(1).all() and later.meanwhile is None
    with pytest.raises(PeerFailed, match=rf"rank {first} .* left the communicator"):
        act_later()


class WordsWithEvent:
    """A board's words; `event` happens after so many loads of a row's state or epoch."""

    def __init__(self, words: _native.Words, row: int, loads: int, event: Callable[[], None]) -> None:
        self._words, self._row, self._loads, self._event = words, row, loads, event

    def __getitem__(self, word: int) -> int:
        value = self._words[word]
        if word - self._row in (STATE, EPOCH):
            self._loads -= 1
            if self._loads == 0:
                self._event()
        return value


@pytest.mark.parametrize("state", [CLOSED, ABORTED, REPLACED])
def test_a_rank_that_enters_a_board_is_not_taken_for_what_it_was_on_an_earlier_one(state: int) -> None:
    """Its row holds the words of the earlier board until then, whenever that is."""
    for loads in (1, 2, 3):
        memory = mmap.mmap(-1, layout_of(2).nbytes)
        earlier, _ = boards_of_two(0, memory)
        earlier.leave(state, b"on the earlier board")
        late, early = boards_of_two(4, memory, entered=False)
        early.enter(3, ())
        words: Any = WordsWithEvent(early.words, early.rows[SENDER], loads, lambda late=late: late.enter(3, ()))  # type: ignore[misc]
        early.words = words
        early.check_peers(lambda: [SENDER])


LARGE, MANY = 40_000, 60_000  # elements: beyond a slot
COUNTS = [0, 3, 4_097, 10_001, 16_384, LARGE, 4 * LARGE + 1]


def run(comm: Communicator, program: list[tuple[str, int, int, int, int]]) -> None:
    """Run each op on inputs that identify their rank, and check the results; drops all tensors between ops.

    Before it some ranks (bit r for rank r) are set to report that they are near, whether they are or not, and some to
    prefer reading inputs in place.
    """
    board = board_of(comm)
    for step, (op, root, count, near, wanted) in enumerate(program):
        board.words[board.rows[comm.rank] + NEAR] = near >> comm.rank & 1
        board.words[board.rows[comm.rank] + IN_PLACE_BITS] = ALL_CLASSES * (wanted >> comm.rank & 1)
        collective(op, comm.rank, comm.size, count, root, step).run(comm)


steps = st.tuples(
    st.sampled_from(COLLECTIVES),
    st.integers(0, 2),
    st.sampled_from(COUNTS),
    st.integers(0, 7),
    st.sampled_from([0, 7, 7, 5]),
)
processes = shared_ranks(3, "shm")


@settings(max_examples=20)
@given(program=st.lists(steps, min_size=1, max_size=12))
def test_large_ops_follow_each_other_in_any_order(
    processes: LocalCluster, program: list[tuple[str, int, int, int, int]]
) -> None:
    processes.run(run, program)


@on_ranks(2, "shm")
def test_ranks_on_one_processor_measure_each_other_as_near(comm: Communicator) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    board, tensor = board_of(comm), torch.ones(LARGE)
    assert not board.words[board.rows[comm.rank] + NEAR], "nothing is near before it was measured"
    said = False
    for _ in range(100):
        comm.all_reduce(tensor, op=ReduceOp.MAX)
        said |= bool(board.words[board.rows[comm.rank] + NEAR])
    assert said


@on_ranks(2, "shm")
def test_outputs_that_no_cache_holds_are_right(comm: Communicator) -> None:
    """Outputs of 24 MiB, from inputs and into outputs that begin at any multiple of 4 bytes."""
    count, size, rank = 3 << 20, comm.size, comm.rank
    for first in (0, 1):
        numbers = torch.arange(first, first + count, dtype=torch.int32)
        mine, whole = numbers + rank, torch.zeros(size * count + first, dtype=torch.int32)[first:]
        expected = torch.cat([numbers + r for r in range(size)])
        comm.all_gather_single(whole, mine)
        assert torch.equal(whole, expected)
        given = torch.cat([numbers + r + rank for r in range(size)])
        comm.all_to_all_single(whole, given)
        assert torch.equal(whole, given)
        comm.broadcast(whole if rank else given, 0)
        assert rank == 0 or torch.equal(whole, expected)


@pytest.fixture(scope="module", params=[("shm", "0"), ("inproc", "0"), ("shm", "1")], ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Three ranks, mostly without agreement checks, with which every op would go through Python."""
    with running(3, *request.param) as cluster:
        yield cluster


def lets_read(comm: Communicator) -> bool:
    """Whether the other ranks read this rank's inputs in place in the last large op."""
    board = board_of(comm)
    return bool(board.words[board.rows[comm.rank] + UNSTAGED])


@on_ranks_of("ranks")
def test_large_ops_try_both_copy_modes(comm: Communicator) -> None:
    in_place = []
    for turn in range(12):
        output = torch.empty(comm.size * MANY)
        comm.all_gather_single(output, torch.full((MANY,), float(comm.rank + turn)))
        in_place.append(lets_read(comm))
        assert all(output.view(comm.size, MANY)[r].eq(r + turn).all() for r in range(comm.size))
    assert not any(in_place[:2]), "staged, until the time of that was measured"
    assert any(in_place[2:])


@pytest.mark.parametrize("wanted", [False, True])
@on_ranks_of("ranks")
def test_ops_in_place_are_right_in_both_copy_modes(comm: Communicator, wanted: bool) -> None:
    """The input of an all_to_all in place is copied first, so others may read it while the output is written."""
    size, rank, board = comm.size, comm.rank, board_of(comm)

    def want() -> None:
        """Set whether every rank prefers to read inputs in place."""
        comm.barrier()
        board.words[board.rows[rank] + IN_PLACE_BITS] = ALL_CLASSES * wanted
        comm.barrier()

    want()
    rows = torch.arange(size * MANY, dtype=torch.float32).view(size, MANY) + 1000 * rank
    expected = torch.stack([torch.arange(size * MANY).view(size, MANY)[rank] + 1000.0 * r for r in range(size)])
    comm.all_to_all_single(rows, rows)
    assert torch.equal(rows, expected) and lets_read(comm) == wanted

    want()
    rows = torch.zeros(size, MANY)
    rows[rank] = rank + 1.0
    comm.all_gather_single(rows.view(-1), rows[rank])
    assert torch.equal(rows, (torch.arange(size) + 1.0)[:, None].expand(size, MANY)) and lets_read(comm) == wanted

    want()
    rows = torch.ones(size, MANY) * (rank + 1)
    output = rows.view(-1)[MANY // 2 : MANY // 2 + MANY]
    comm.reduce_scatter_single(output, rows)
    assert output.eq(size * (size + 1) / 2).all()

    want()
    numbers = torch.arange(size * MANY, dtype=torch.float32)
    tensor = numbers * (rank + 1)
    comm.all_reduce(tensor)
    assert torch.equal(tensor, numbers * (size * (size + 1) // 2)) and lets_read(comm) == wanted


@pytest.mark.parametrize("checked", ["0", *second_tier("1")])
def test_ranks_survive_the_death_of_a_rank_that_they_read(checked: str) -> None:
    def gathers_until_one_dies(comm: Communicator) -> str:
        output, mine = torch.empty(comm.size * MANY), torch.ones(MANY)
        board = board_of(comm)
        if comm.rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises((PeerFailed, Revoked)) as caught:
            while time.monotonic() - began < PATIENCE:
                board.words[board.rows[comm.rank] + IN_PLACE_BITS] = ALL_CLASSES
                comm.all_gather_single(output, mine)
                assert output.eq(1).all()
        assert isinstance(caught.value, Revoked) or caught.value.ranks == (1,)
        assert time.monotonic() - began < PATIENCE
        return caught.type.__name__

    with running(3, "shm", checked) as cluster:
        for _ in range(5):
            outcomes = cluster.outcomes(gathers_until_one_dies)
            assert [outcomes[rank].error for rank in (0, 2)] == [None, None]
            assert "PeerFailed" in (outcomes[0].value, outcomes[2].value)
