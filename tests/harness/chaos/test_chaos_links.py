"""A proxy slows, cuts or corrupts the links between unmodified processes, or loses segments."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ft import Session
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote
from holdfast.harness import LocalCluster
from holdfast.harness.links.client import Links
from holdfast.harness.links.policy import BULK, CLEAR, LinkPolicy, LinkRule, combined
from holdfast.harness.links.proxy import Direction
from support.programs.forked_programs import run_python
from support.waiting import PROGRAM_SECONDS, eventually

policies = st.builds(
    LinkPolicy,
    delay=st.floats(0, 1),
    rate=st.floats(0, 1e6),
    loss=st.floats(0, 1),
    corrupt=st.floats(0, 1),
    cut=st.booleans(),
)

# -- policies


@given(policies, policies)
def test_two_policies_at_once_are_never_milder_than_one_and_an_empty_one_adds_nothing(
    one: LinkPolicy, other: LinkPolicy
) -> None:
    both = one & other
    assert both.delay >= max(one.delay, other.delay)
    assert both.loss >= max(one.loss, other.loss) - 1e-12
    assert both.cut == (one.cut or other.cut)
    if one.rate > 0:
        assert 0 < both.rate <= one.rate
    same = one & CLEAR
    assert (same.delay, same.rate, same.cut) == (one.delay, one.rate, one.cut)
    assert (same.loss, same.corrupt) == pytest.approx((one.loss, one.corrupt))


def test_rules_name_sender_receiver_and_plane() -> None:
    rules = [
        LinkRule(policy=LinkPolicy(cut=True), sources=frozenset([1]), targets=frozenset([2]), plane="control"),
        LinkRule(policy=LinkPolicy(delay=0.5), targets=frozenset([3])),
    ]
    assert combined(rules, 1, 2, True).cut
    assert not combined(rules, 2, 1, True).cut, "one way"
    assert not combined(rules, 1, 2, False).cut, "the other plane"
    assert combined(rules, 1, 3, False) == LinkPolicy(delay=0.5)


@given(st.lists(st.tuples(policies, st.integers(1, 1 << 18)), max_size=20))
def test_parts_of_a_stream_never_overtake_each_other(pieces: list[tuple[LinkPolicy, int]]) -> None:
    direction, dice, now = Direction(1, 2, False), random.Random(0), 0.0
    due = [direction.due(policy, size, dice, now) for policy, size in pieces]
    assert due == sorted(due)


def test_what_a_delay_or_a_rate_holds_back_is_counted() -> None:
    direction, dice = Direction(1, 2, False), random.Random(0)
    for policy in (LinkPolicy(delay=0.1), LinkPolicy(jitter=0.1), LinkPolicy(rate=1e6)):
        direction.due(policy, 9, dice, 0.0)
    direction.due(LinkPolicy(rate=1e6), 0, dice, 0.0)
    direction.due(LinkPolicy(loss=0.5, corrupt=0.5), 9, dice, 0.0)
    assert direction.held == 3


@given(st.integers(BULK, 4 * BULK) | st.integers(0, 9) | st.just(BULK - 1), st.booleans(), st.integers())
def test_corruption_flips_one_bit_and_spares_possible_headers(size: int, headers: bool, seed: int) -> None:
    """And of a stream that ends nothing."""
    direction, piece = Direction(1, 2, False), bytearray(size)
    direction.spoil(LinkPolicy(corrupt=1.0, headers=headers), piece, random.Random(seed))
    flipped = size >= BULK or (headers and size > 0)
    assert len(piece) == size
    assert (direction.corrupted, sum(byte.bit_count() for byte in piece)) == (flipped, flipped)


# -- a client and an echo server with the proxy between them


def echo(join: Any, channel: ProcessChannel) -> None:
    """The body of the server: sends its port to the test, and echoes every connection."""

    def serve(sock: socket.socket) -> None:
        with sock:
            while data := sock.recv(1 << 16):
                sock.sendall(data)

    join()
    with socket.create_server(("127.0.0.1", 0)) as server:
        channel.send(server.getsockname()[1])
        while True:
            threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()


def ask(join: Any, channel: ProcessChannel) -> None:
    """The body of the client: connects to a port, then sends what the test gives it to the server.

    The answer to the test has the echoed bytes, or the name of the error, and the seconds that it took.
    """
    join()
    sock = socket.create_connection(("127.0.0.1", channel.recv(PROGRAM_SECONDS)))
    sock.settimeout(0.5)
    channel.send(sock.getpeername()[1])
    while True:
        data = channel.recv(PROGRAM_SECONDS)
        began, back = time.monotonic(), b""
        try:
            sock.sendall(data)
            while len(back) < len(data) and (more := sock.recv(1 << 20)):
                back += more
        except OSError as error:
            channel.send((type(error).__name__, time.monotonic() - began))
        else:
            channel.send((back, time.monotonic() - began))


class LinkedPair:
    """Both processes, and the proxy between them."""

    def __init__(self, links: Links, client: ForkedProcess, server: ForkedProcess) -> None:
        self.links, self.client, self.server = links, client, server

    def ask(self, data: bytes) -> tuple[Any, float]:
        self.client.channel.send(data)
        answer: tuple[Any, float] = self.client.channel.recv(PROGRAM_SECONDS)
        return answer

    def rule(self, policy: LinkPolicy, back: bool = False) -> tuple[int, ...]:
        one, other = frozenset([self.client.pid]), frozenset([self.server.pid])
        source, target = (other, one) if back else (one, other)
        return self.links.add([LinkRule(policy=policy, sources=source, targets=target)])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[LinkedPair]:
    with Links() as links:
        join = links.prepare()
        server = zygote().spawn(partial(echo, join), name="echo", output=tmp_path / "echo")
        client = zygote().spawn(partial(ask, join), name="ask", output=tmp_path / "ask")
        try:
            port = server.channel.recv(PROGRAM_SECONDS)
            client.channel.send(port)
            assert client.channel.recv(PROGRAM_SECONDS) == port, "getpeername gives the wanted address"
            yield LinkedPair(links, client, server)
        finally:
            client.close()
            server.close()


def test_bytes_pass_and_are_counted_and_a_delay_and_a_rate_apply_until_they_are_removed(pair: LinkedPair) -> None:
    data = random.Random(0).randbytes(1 << 20)
    assert pair.ask(data)[0] == data
    there = next(each for each in pair.links.traffic() if each.source == str(pair.client.pid))
    assert (there.bytes, there.connections) == (1 << 20, 1)
    late = pair.rule(LinkPolicy(delay=0.1))
    assert pair.ask(b"x")[1] >= 0.1
    pair.links.remove(late)
    slow = pair.rule(LinkPolicy(rate=1e6), back=True)
    assert pair.ask(bytes(200_000))[1] >= 0.2
    pair.links.remove(slow)
    assert pair.ask(b"y")[0] == b"y"


def test_a_cut_raises_no_error_and_its_bytes_are_counted_and_arrive_after_it(pair: LinkedPair) -> None:
    def held() -> int:
        return sum(each.held for each in pair.links.traffic())

    pair.ask(b"passes")
    before = held()
    cut = pair.rule(LinkPolicy(cut=True), back=True)
    assert held() == before, "nothing has come its way"
    assert pair.ask(b"held")[0] == "TimeoutError"
    assert held() > before
    pair.links.remove(cut)
    back, _ = pair.ask(b"more")
    assert (back + b"more").startswith(b"held")


def test_corruption_and_resets_are_counted(pair: LinkedPair) -> None:
    spoil = pair.rule(LinkPolicy(corrupt=1.0))
    back, _ = pair.ask(bytes(1 << 16))
    assert any(back)
    pair.links.remove(spoil)
    assert sum(each.corrupted for each in pair.links.traffic()) > 0
    pair.rule(LinkPolicy(reset=True))
    assert pair.ask(b"z")[0] in ("ConnectionResetError", "BrokenPipeError")
    assert any(each.reset for each in pair.links.traffic())


UNPRIVILEGED = """
import ctypes, os, socket
from holdfast.harness.links import seccomp
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a process is that was never root
ours, theirs = socket.socketpair()
wanted, door = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
child = os.fork()
if child == 0:
    socket.send_fds(theirs, [b"!"], [seccomp.install(os.getppid())])
    asking = socket.socket()
    asking.connect(wanted.getsockname())
    os._exit(0)
_, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
call = seccomp.receive(listener)
assert call.number == seccomp.machine().connect
duplicate = socket.socket(fileno=seccomp.borrow(os.pidfd_open(child), call.arguments[0]))
assert open(f"/proc/{child}/mem", "rb").readable()
seccomp.done(listener, call, duplicate.connect_ex(door.getsockname()))
door.settimeout(5.0)
door.accept()
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.thorough
def test_links_need_no_privilege() -> None:
    """A user without any capability leads a connection to another address by seccomp."""
    run_python("-c", UNPRIVILEGED)


def test_a_partitioned_job_commits_no_step_and_goes_on_once_healed() -> None:
    def work(session: Session) -> tuple[int, int | None]:
        """Run steps of some milliseconds; returns the number of steps, and of ranks at the end."""
        for attempt in session.steps(100):
            with attempt:
                time.sleep(0.002)
                attempt.comm.all_reduce(torch.ones(8))
        return session.step, session.size

    with LocalCluster(2, "gloo", links=True) as cluster:
        job = cluster.start(work)
        job.wait_for("committed", step=10)
        job.partition([0], [1])

        def newest() -> int:
            return max(event["step"] for event in job.events() if event["kind"] == "committed")

        def stands_still() -> bool:
            before = newest()
            time.sleep(0.5)
            return newest() == before

        eventually(stands_still)
        assert newest() < 99
        job.heal()
        assert job.results() == [(100, 2), (100, 2)], "on one host silence is no death: no rank was evicted"
