"""Ranks over ucx reconnect: they reuse living endpoints, find the rest in the store, and accept nothing old."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.ucx import farewells, handshake
from holdfast.backends.ucx.endpoints import Connections, PeerLink
from holdfast.backends.ucx.farewells import Notice, parse
from holdfast.backends.ucx.libucp import UcxError
from holdfast.backends.ucx.transport import UcxTransport
from holdfast.comms import Communicator, HoldfastError, OpTimeout, PeerFailed, Revoked
from holdfast.comms.errors import CorruptData
from holdfast.harness import LocalCluster
from support.meeting import Epochs
from support.waiting import eventually


class UcxEpochs(Epochs):
    """One process in epoch after epoch; keeps its communicators until `close`."""

    def __init__(self, comm: Communicator, folder: Path) -> None:
        super().__init__("ucx", comm, folder)
        self._folder = folder
        self.comm: Communicator | None = None
        self._old: list[Communicator] = []

    def enter(
        self, epoch: int, processes: Sequence[int], *, alone: bool = False, timeout: float = 10.0
    ) -> Communicator:
        """Take part in the next epoch as one of `processes`."""
        if self.comm is not None:
            self._old.append(self.comm)
        previous, self.comm = (self._old[-1] if self._old else None), None
        payload = [epoch, self.me]
        self.comm = self.next(epoch, processes, previous, alone=alone, timeout=timeout, connect_payload=payload)
        return self.comm

    def leave_barrier(self, comm: Communicator) -> None:
        """Enter a barrier, and return once all ranks have left it: a link that breaks then ends no op."""
        comm.barrier()
        at = self._folder / f"barrier of epoch {comm.epoch}"
        at.mkdir(exist_ok=True)
        (at / str(comm.rank)).touch()
        eventually(lambda: len(list(at.iterdir())) == comm.size, 20.0)

    def worker(self) -> object:
        """The worker in use."""
        assert self.comm is not None
        assert isinstance(self.comm.transport, UcxTransport)
        assert self.comm.transport.connections is not None
        return self.comm.transport.connections.worker

    def close(self) -> None:
        for comm in [*self._old, *([self.comm] if self.comm is not None else [])]:
            comm.close()


@pytest.fixture(scope="module", params=["posix,cma,self", "tcp,self"])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Four processes with shared memory and TCP as their ucx transports."""
    with LocalCluster(4, "ucx", timeout=60.0, environ={"UCX_TLS": request.param}) as ranks:
        ranks.warm_up()
        yield ranks


def in_epochs(size: int, cluster: LocalCluster, body: Callable[[UcxEpochs], object], at: Path) -> list[object]:
    """The results of `body` in each of the first `size` processes."""

    def whole(comm: Communicator) -> object:
        epochs = UcxEpochs(comm, at)
        try:
            return body(epochs) if comm.rank < size else None
        finally:
            comm.barrier()
            epochs.close()

    return cluster.run(whole)[:size]


def total(comm: Communicator, count: int = 3) -> float:
    tensor = torch.full((count,), 1.0 + comm.rank)
    comm.all_reduce(tensor)
    return float(tensor[-1])


def test_survivors_reuse_endpoints_without_asking_the_store(cluster: LocalCluster, tmp_path: Path) -> None:
    def body(epochs: UcxEpochs) -> object:
        epochs.enter(1, [0, 1, 2, 3])
        worker = epochs.worker()
        if epochs.me == 1:
            return None
        second = epochs.enter(2, [3, 0, 2], alone=True)
        assert second.connect_payloads == [(2, 3), (2, 0), (2, 2)]
        sums = [total(second, count) for count in (3, 300_000)]
        second.barrier()
        if epochs.me != 2:
            sums.append(total(epochs.enter(3, [0, 3], alone=True)))
        return sums, epochs.worker() is worker

    found = in_epochs(4, cluster, body, tmp_path)
    assert found == [([6, 6, 3], True), None, ([6, 6], True), ([6, 6, 3], True)]


def test_survivors_find_a_new_rank_and_a_restarted_rank(cluster: LocalCluster, tmp_path: Path) -> None:
    def body(epochs: UcxEpochs) -> float:
        if epochs.me != 3:
            first = epochs.enter(1, [0, 1, 2])
            epochs.leave_barrier(first)
            if epochs.me == 1:
                assert isinstance(first.transport, UcxTransport)
                given_up = first.transport.hand_over([])
                assert given_up is not None
                given_up.close()
        return total(epochs.enter(2, [0, 1, 2, 3], timeout=20.0))

    assert in_epochs(4, cluster, body, tmp_path) == [10.0] * 4


def test_a_rank_that_was_left_out_comes_back(cluster: LocalCluster, tmp_path: Path) -> None:
    def body(epochs: UcxEpochs) -> float:
        first = epochs.enter(1, [0, 1, 2])
        total(first, 300_000)
        first.barrier()
        if epochs.me != 2:
            total(epochs.enter(2, [0, 1]))
        return total(epochs.enter(3, [0, 1, 2]), 300_000)

    assert in_epochs(3, cluster, body, tmp_path) == [6.0] * 3


def test_the_next_attempt_reuses_the_endpoints_of_a_failed_one(cluster: LocalCluster, tmp_path: Path) -> None:
    def body(epochs: UcxEpochs) -> object:
        epochs.enter(1, [0, 1, 2])
        worker = epochs.worker()
        if epochs.me != 2:
            with pytest.raises((OpTimeout, Revoked, PeerFailed)):
                epochs.enter(2, [0, 1, 2], timeout=0.5)
        result = total(epochs.enter(3, [0, 1, 2]))
        return result, epochs.worker() is worker

    assert in_epochs(3, cluster, body, tmp_path) == [(6.0, True)] * 3


def test_endpoints_made_by_a_failed_attempt_close_with_the_last_communicator(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def body(epochs: UcxEpochs) -> bool:
        first = epochs.enter(1, [0, 1])
        epochs.leave_barrier(first)
        if epochs.me == 0:
            assert isinstance(first.transport, UcxTransport)
            given_up = first.transport.hand_over([])
            assert given_up is not None
            given_up.close()
            with pytest.raises(OpTimeout):
                epochs.enter(2, [0, 1], timeout=0.3)
            first.abort("again")
            first.close()
            assert first.transport.hand_over([]) is None
        return True

    assert in_epochs(2, cluster, body, tmp_path) == [True, True]


@pytest.mark.parametrize("count", [3, 2_000_000])
def test_no_epoch_receives_messages_of_an_earlier_one(count: int, cluster: LocalCluster, tmp_path: Path) -> None:
    def body(epochs: UcxEpochs) -> float:
        first = epochs.enter(1, [0, 1])
        if epochs.me == 0:
            work = first.send(torch.full((count,), 7.0), 1, async_op=True)
            with pytest.raises(HoldfastError):
                first.recv(torch.zeros(count), 1, tag=5, timeout=0.3)
            with suppress(HoldfastError):
                work.wait()
        second = epochs.enter(2, [0, 1])
        if epochs.me == 0:
            second.send(torch.full((count,), 8.0), 1)
            return 8.0
        tensor = torch.zeros(count)
        second.recv(tensor, 0)
        return float(tensor[0])

    assert in_epochs(2, cluster, body, tmp_path) == [8.0, 8.0]


def test_a_malformed_notice_ends_the_epoch_and_a_later_farewell_is_heard(cluster: LocalCluster, tmp_path: Path) -> None:
    def body(epochs: UcxEpochs) -> str:
        comm = epochs.enter(1, [0, 1])
        if epochs.me == 0:
            transport = comm.transport
            assert isinstance(transport, UcxTransport)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(farewells, "WorkerFarewell", lambda aborted, why: {"type": "what nobody says"})
                transport.notices.send_farewell([transport.links[1].endpoint], True, "")
            transport.notices._said = False
            comm.abort("called off")
            (tmp_path / "said").touch()
            eventually((tmp_path / "heard").exists, 10.0)  # a closing process drops what it could not send yet
            return ""
        eventually((tmp_path / "said").exists, 10.0)  # no process sends a farewell to one that has left
        with pytest.raises(CorruptData, match="neither hello nor farewell"):
            comm.recv(torch.zeros(1), 0)
        transport = comm.transport
        assert isinstance(transport, UcxTransport)

        def heard() -> bool:
            with transport._lock:
                transport._worker.progress()
                transport.notices.poll()
            return 0 in transport.notices.left

        eventually(heard, 10.0)
        (tmp_path / "heard").touch()
        return transport.notices.left[0][0].why

    assert "called off" in str(in_epochs(2, cluster, body, tmp_path)[1])


@given(st.binary(max_size=64))
def test_a_malformed_notice_is_refused(text: bytes) -> None:
    with suppress(CorruptData):
        assert isinstance(parse(text), Notice)


def test_a_process_survives_a_peer_that_connects_and_dies_before_it_is_heard(
    cluster: LocalCluster, tmp_path: Path
) -> None:
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

    def body(epochs: UcxEpochs) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            if epochs.me == 0:
                patch.setattr(handshake._Handshake, "_exchange_addresses", look_late)
            else:
                patch.setattr(handshake, "Connections", type("Leaving", (Connections,), {"link": leave}))
            with pytest.raises((PeerFailed, OpTimeout)):
                epochs.enter(1, [0, 1], timeout=1.0)
        gone.touch()
        return True

    assert in_epochs(2, cluster, body, tmp_path) == [True, True]
