"""How `nccl` ends, bounds waits and tells errors apart, by torch's rules for ProcessGroupNCCL (2.13).

Without a GPU: over stand-ins that record the calls of torch's group in order, and that block and fail as it does.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.backends.common.torch_group import TorchGroup
from holdfast.backends.nccl import streams, torch_groups
from holdfast.backends.nccl import transport as nccl
from holdfast.backends.nccl.torch_groups import this_thread
from holdfast.comms import HoldfastError, OpTimeout, PeerFailed, ReduceOp
from holdfast.comms.ops import OpPlan
from holdfast.comms.plugins.spec import Available
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import Liveness, start_time, this_host, this_process
from support.comms.meeting import run_in_threads, soon
from support.comms.nccl_stand_in import LikeNccl, OnTheHost
from support.waiting import PATIENCE, eventually


class Recording:
    """A group that records its calls and answers them as `does` says, else does nothing."""

    def __init__(self, **does: Callable[..., Any]) -> None:
        self.calls: list[str] = []
        self._does = does

    def __getattr__(self, name: str) -> Any:
        if name == "get_error" and name not in self._does:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            shown = f"({arguments[0].total_seconds():g} s)" if name == "_set_default_timeout" else ""
            self.calls.append(name + shown)
            return self._does[name](*arguments) if name in self._does else None

        return call


def over(group: Any) -> OnTheHost:
    return OnTheHost(0, 2, dist.HashStore(), group)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine, no group is left behind because of it."""
    monkeypatch.setattr(nccl, "_ABORT_SECONDS", 2 * PATIENCE)


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: Any) -> None:
        raise error

    return call


fail = raising(dist.DistBackendError("NCCL error in: there, unhandled system error"))


@pytest.fixture
def blocked() -> Iterator[Callable[..., None]]:
    """A call that does not return before the test ends."""
    end = threading.Event()
    yield lambda *_: end.wait(2 * PATIENCE) and None
    end.set()


# Timeouts -----------------------------------------------------------------------------------------------------------


def test_each_op_has_its_own_timeout_which_torch_takes_from_the_group_when_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)  # no time passes between a deadline and its op
    group = Recording()
    transport, ones = over(group), torch.ones(2)
    transport.all_reduce(ones, ReduceOp.SUM, soon(2.0))
    transport.all_reduce(ones, ReduceOp.SUM, soon(2.0))
    transport.broadcast(ones, 0, soon(0.5))
    transport.send(ones, 1, 0, soon(float("inf")))
    assert group.calls == [
        "_set_default_timeout(2 s)", "allreduce", "allreduce", "_set_default_timeout(0.5 s)", "broadcast",
        "_set_default_timeout(1e+08 s)", "_start_coalescing", "send", "_end_coalescing",
    ]  # fmt: skip
    transport = OnTheHost(0, 1, dist.HashStore())
    transport.all_reduce(ones, ReduceOp.SUM, soon(2.0))
    assert isinstance(transport._group, LikeNccl)
    assert transport._group.options._timeout == timedelta(seconds=2)
    nccl2, limits = Recording(), list[float]()  # it has `set_timeout` alone, which torch 2.14 gave to all groups
    nccl2.set_timeout = lambda limit: limits.append(limit.total_seconds())  # type: ignore[attr-defined]
    nccl2._set_default_timeout = None  # type: ignore[attr-defined]
    over(nccl2).all_reduce(ones, ReduceOp.SUM, soon(2.0))
    over(nccl2).send(ones, 1, 0, soon(3.0))
    assert limits == [2.0, 3.0]


# Connecting ---------------------------------------------------------------------------------------------------------


def test_connecting_is_the_first_op_and_ends_when_a_peer_dies_or_the_view_is_superseded(
    blocked: Callable[..., None],
) -> None:
    group = Recording()
    over(group).connect_ranks(soon(), lambda: None)
    assert [each for each in group.calls if not each.startswith("_set")] == ["allreduce"]
    transport = over(Recording(allreduce=blocked, abort=blocked))
    threading.Timer(0.1, transport.abort, (PeerFailed((1,), "gone"),)).start()
    with pytest.raises(PeerFailed, match="gone"):
        transport.connect_ranks(soon(), lambda: None)
    later = soon(0.1)
    with pytest.raises(HoldfastError, match="another view"):
        over(Recording(allreduce=blocked)).connect_ranks(
            soon(), lambda: HoldfastError("another view") if time.monotonic() > later else None
        )


def test_a_rank_that_cannot_connect_is_not_held_up_by_the_end_of_its_group(
    blocked: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_abort = threading.Event()
    ended: list[str] = []

    def abort(*_: Any) -> None:
        assert may_abort.wait(PATIENCE)
        ended.append("abort")

    monkeypatch.setattr(nccl, "NcclTransport", lambda *_: over(Recording(allreduce=blocked, abort=abort)))
    with pytest.raises(OpTimeout, match="connect"):
        nccl.connect_over(context(0, "cuda", "a", deadline=soon(0.2)), "nccl")
    assert not ended, "it waits for no abort"
    may_abort.set()
    eventually(lambda: ended == ["abort"])


def test_each_communicator_waits_for_late_ranks_by_its_own_deadline_or_until_its_epoch_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own wait has the bound of the process, so it begins later."""
    arrived: list[int] = []

    def connected(*_: Any) -> None:
        assert arrived == [1], "torch's wait begins when all ranks are there"

    def connect(rank: int, store: dist.Store, seconds: float) -> None:
        if rank == 1:
            arrived.append(rank)
        nccl.connect_over(context(rank, "cuda", "aa", store=store, deadline=soon(seconds)), "nccl")

    monkeypatch.setattr(nccl, "NcclTransport", lambda *_: over(Recording(allreduce=connected)))
    with pytest.raises(OpTimeout) as caught:
        connect(0, dist.HashStore(), 0.1)
    assert caught.value.missing_ranks == (1,)
    store = dist.HashStore()
    late = threading.Timer(0.3, connect, (1, store, 20.0))
    late.start()
    connect(0, store, 20.0)
    late.join()
    place = context(0, "cuda", "aa", over=lambda: HoldfastError("another view"))
    with pytest.raises(HoldfastError, match="another view"):
        nccl.connect_over(place, "nccl")


# Ends ---------------------------------------------------------------------------------------------------------------


def test_an_abort_that_raises_does_not_end_the_watcher(caplog: pytest.LogCaptureFixture) -> None:
    looks = iter([(), (1,), ()])
    seen: list[HoldfastError | None] = []
    ended = threading.Event()

    def wait(wake: int, seconds: float) -> bool:
        seen.append(transport._error)
        return len(seen) < 4 or ended.set() is not None

    transport = over(Recording(abort=fail))
    transport._end_group = lambda: fail()  # type: ignore[method-assign]
    transport._liveness = SimpleNamespace(wait=wait, dead=lambda: next(looks))  # type: ignore[assignment]
    transport._wake = -1
    with caplog.at_level(logging.CRITICAL):
        transport._watch_peers("nccl")
        assert ended.wait(10)
    assert [str(each) for each in seen[:2]] == ["None", "None"] and isinstance(seen[2], PeerFailed)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> torch_groups.BackgroundEnds:
    """The ends of this test alone."""
    fresh = torch_groups.BackgroundEnds(most=2)
    monkeypatch.setattr(nccl, "ends", fresh)
    return fresh


def test_an_abort_is_made_once_named_by_later_ops_and_left_behind_if_it_takes_longer_than_its_own_time(
    blocked: Callable[..., None],
    ends: torch_groups.BackgroundEnds,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(nccl, "_ABORT_SECONDS", 0.3)
    group = Recording(abort=blocked)
    transport, began = over(group), time.monotonic()
    gather = transport.function(OpPlan.make("all_gather", torch.float32, 8, 0, None, 5.0))
    transport.all_reduce(torch.ones(2), ReduceOp.SUM, soon(60))
    transport.abort(PeerFailed((1,), "gone"))
    transport.abort(OpTimeout("later", 1, 1.0))
    with pytest.raises(PeerFailed, match="gone"):
        transport.all_reduce(torch.ones(2), ReduceOp.SUM, soon())
    with pytest.raises(PeerFailed, match="gone"):
        gather(torch.empty(2, 2), torch.ones(2), soon())
    transport.close()
    assert time.monotonic() - began < PATIENCE
    eventually(lambda: ends.left_behind == 1)
    assert group.calls[-2:] == ["_set_default_timeout(0.3 s)", "abort"] and group.calls.count("abort") == 1
    assert "left behind" in caplog.text


def test_the_next_communicator_connects_and_its_ops_run_while_the_old_group_still_ends() -> None:
    """An abort takes half a second: no recovery waits for it, and what the device may still use is kept until then."""
    happened: list[str] = []
    may_end = threading.Event()

    def abort(*_: Any) -> None:
        happened.append("the abort begins")
        assert may_end.wait(PATIENCE)
        happened.append("the abort ends")

    old = over(Recording(abort=abort))
    old.all_reduce(torch.ones(2), ReduceOp.SUM, soon())
    old.abort(PeerFailed((1,), "gone"))
    with pytest.raises(PeerFailed, match="gone"):
        old.barrier(soon())
    eventually(lambda: happened == ["the abort begins"])
    after, tensor = OnTheHost(0, 1, dist.HashStore()), torch.ones(2)
    after.connect_ranks(soon(), lambda: None)
    happened.append("the next one is connected")
    after.all_reduce(tensor, ReduceOp.SUM, soon())
    assert tensor.tolist() == [1, 1]
    old.close()
    happened.append("the old one is closed")
    flag = weakref.ref(old._flag)
    del old
    gc.collect()
    assert flag() is not None
    may_end.set()
    eventually(lambda: happened[-1] == "the abort ends" and gc.collect() >= 0 and flag() is None)
    after.close()
    assert happened == [
        "the abort begins", "the next one is connected", "the old one is closed", "the abort ends",
    ]  # fmt: skip


def test_no_more_groups_end_at_once_than_the_limit_and_too_many_left_behind_stop_new_ones(
    blocked: Callable[..., None], ends: torch_groups.BackgroundEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []

    def end(seconds: float) -> None:
        running.append(len(running))
        time.sleep(seconds)
        running.pop()

    most: list[int] = []
    for _ in range(4):
        ends.begin(lambda: (end(0.05), most.append(len(running)))[0], PATIENCE, ())
    eventually(lambda: len(most) == 4)
    assert max(most) < 2 and ends.left_behind == 0
    ends.check()
    for _ in range(2):
        ends.begin(blocked, 0.05, ())
    eventually(lambda: ends.left_behind == 2)
    with pytest.raises(HoldfastError, match="2 groups of NCCL in this process did not end"):
        nccl.connect_over(context(0, "cuda", "a"), "nccl")


def test_a_close_that_others_do_not_join_becomes_an_abort(
    blocked: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl.NcclTransport, "_close_seconds", 0.2)
    group, began = Recording(shutdown=blocked), time.monotonic()
    over(group).close()
    assert group.calls == ["shutdown", "abort"] and time.monotonic() - began < PATIENCE
    group = Recording(shutdown=fail)
    over(group).close()
    assert group.calls == ["shutdown", "abort"]
    group = Recording()
    over(group).close()
    assert group.calls == ["shutdown"]


def test_the_error_tells_what_torchs_watchdog_found_or_that_it_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, error in (("TIMEOUT", OpTimeout), ("COMM_ERROR", PeerFailed)):
        found = over(Recording(get_error=lambda kind=kind: SimpleNamespace(name=kind)))._own_failure()
        assert type(found) is error
    assert over(Recording(get_error=lambda: SimpleNamespace(name="SUCCESS")))._own_failure() is None
    assert "cannot report" in str(over(Recording(get_error=fail))._own_failure())
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("WithoutGetError", (), {}), raising=False)
    assert not nccl.finds_failures()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("With", (), {"get_error": None}), raising=False)
    assert nccl.finds_failures()


def test_a_lost_connection_is_told_as_the_death_that_it_comes_before() -> None:
    """A killed process loses its connections first: survivors said "unknown ranks failed"."""
    peer = subprocess.Popen(["sleep", "60"])

    def get_error() -> Any:
        peer.kill()
        return SimpleNamespace(name="COMM_ERROR")

    transport = over(Recording(get_error=get_error))
    peers = [this_process(), Peer(this_host(), peer.pid, start_time(peer.pid))]
    transport._liveness = Liveness(peers, 0)
    transport._wake = OwnedDescriptor(os.eventfd(0, os.EFD_CLOEXEC))
    transport._watch_peers("nccl")
    try:
        eventually(lambda: transport.ended is not None)
        assert isinstance(transport.ended, PeerFailed) and transport.ended.ranks == (1,)
    finally:
        TorchGroup._forget_peers(transport)
        peer.wait()


def test_an_error_of_this_process_is_not_told_as_a_peers_death() -> None:
    def fails_with(fails: Callable[..., None]) -> None:
        over(Recording(allreduce=fails)).all_reduce(torch.ones(2), ReduceOp.SUM, soon())

    with pytest.raises(torch.OutOfMemoryError):
        fails_with(raising(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(PeerFailed, match="unhandled system error"):
        fails_with(fail)
    with pytest.raises(PeerFailed, match="network error"):  # of torch's alltoall
        fails_with(raising(RuntimeError("NCCL Error 6: remote process exited or there was a network error")))


def test_a_transport_has_settled_once_the_device_has_done_what_both_streams_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def events(*looks: bool) -> Callable[[], Any]:
        """A function that makes an event, which the device has passed at the last of these looks."""
        left = list(looks)
        return lambda: SimpleNamespace(query=lambda: left.pop(0) if len(left) > 1 else left[0])

    transport = over(Recording())
    monkeypatch.setattr(streams, "_cuda", SimpleNamespace(Stream=lambda device: None, Event=lambda: None))
    side = streams.SideStream(torch.device("cuda"), transport._check)
    side._running = deque([(events(False, True)(), lambda: None)])
    transport._side = side
    transport._passed = events(False, True)  # type: ignore[method-assign]
    transport.settle(soon())
    transport._passed = events(False)  # type: ignore[method-assign]
    with pytest.raises(OpTimeout, match="settle"):
        transport.settle(soon(0.01))
    transport._passed = events(True)  # type: ignore[method-assign]
    transport.abort(PeerFailed((1,), "gone"))
    with pytest.raises(PeerFailed, match="gone"):  # an aborted op lets the device pass, too
        transport.settle(soon())


# Groups of calls ----------------------------------------------------------------------------------------------------


class LikeNcclsThreads(Recording):
    """NCCL's rule of open groups: calls of a thread with an open group wait for the group's end."""

    depth = threading.local()

    def __init__(self, **does: Callable[..., Any]) -> None:
        super().__init__(
            **{"_start_coalescing": lambda: self.add(1), "_end_coalescing": lambda: self.add(-1)}
            | {"_group_end": lambda: self.add(-1), "allreduce": self.launch}
            | does
        )
        self.launched = 0

    @classmethod
    def open(cls) -> int:
        return getattr(cls.depth, "value", 0)

    def add(self, number: int) -> None:
        if self.open() + number < 0:
            raise dist.DistBackendError("ncclGroupEnd: not in a group call")
        self.depth.value = self.open() + number

    def launch(self, *_: Any) -> None:
        self.launched += self.open() == 0


@pytest.mark.parametrize("which", ["send", "recv", "_end_coalescing", "both ends", "alltoall"])
def test_ops_of_the_next_communicator_start_though_an_exception_came_amid_a_group_of_calls(which: str) -> None:
    """A group of this thread stays open if both ends of it fail, and torch leaves that of its alltoall open itself."""

    def opened(*_: Any) -> None:
        broken.add(1)
        fail()

    def body(_: int) -> None:
        ones, stays_open = torch.ones(2), which in ("both ends", "alltoall")
        with pytest.raises(PeerFailed):
            if which == "alltoall":
                over(broken).all_to_all([ones] * 2, [ones] * 2, soon())
            else:
                over(broken).batch_send_recv([(ones, 1, 0)], [(torch.ones(2), 1, 0)], soon())
        assert LikeNcclsThreads.open() == this_thread.left_open == stays_open
        after = LikeNcclsThreads()
        next_one = over(after)
        for _ in range(3):
            next_one.all_reduce(ones, ReduceOp.SUM, soon())
        assert after.launched == 3
        next_one.close()

    several = {"both ends": {"_end_coalescing": fail, "_group_end": fail}, "alltoall": {"alltoall": opened}}
    broken = LikeNcclsThreads(**several.get(which, {which: fail}))
    run_in_threads(1, body, 30.0)


# torch's variables --------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [each for each in os.environ if each.startswith("TORCH_NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch_groups, "_said", set())
    return monkeypatch


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL_")}


@pytest.mark.parametrize(
    ("theirs", "warned"),
    [
        ([], []),
        (
            ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_BLOCKING_WAIT"],
            ["TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "TORCH_NCCL_DUMP_ON_TIMEOUT=1", "TORCH_NCCL_BLOCKING_WAIT"],
        ),
    ],
)
def test_a_group_is_made_so_that_its_failures_neither_wait_nor_end_the_process_or_a_warning_says_otherwise(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, theirs: list[str], warned: list[str]
) -> None:
    for name in theirs:
        environment.setenv(name, "1")
    for _ in range(2):
        with torch_groups.settings_of_a_group():
            assert variables() == {
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
                "TORCH_NCCL_ENABLE_MONITORING": "0",
                "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
                "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
                **dict.fromkeys(theirs, "1"),
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
            }
        assert variables() == dict.fromkeys(theirs, "1")
    assert [record.getMessage().split()[0] for record in caplog.records] == warned


class Made:
    """What ProcessGroupNCCL and ProcessGroupNCCL2 are made with; `lazy_init` is an option of torch 2.15."""

    class Options:
        lazy_init = False

        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    def __init__(self, store: Any, rank: int, size: int, options: Any, device: Any = None) -> None:
        self.made, self.device, self.variables = options, device, variables()


def test_the_older_group_blocks_unless_the_user_says_otherwise(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(dist, "ProcessGroupNCCL", Made, raising=False)
    environment.setattr(torch_groups, "kind_of_group", lambda: torch_groups.LEGACY)
    environment.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "")
    environment.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT")
    place: Any = SimpleNamespace(store=None, rank=0, size=1, deadline=soon(12), hints={})
    gpu = torch.device("cuda", 1)
    group = torch_groups.make_group(place, gpu)
    assert torch_groups.blocks() and group.made.config.blocking is None
    assert group.variables["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "300", "torch reads it once, so no timeout decides"
    environment.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    environment.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "7")
    group = torch_groups.make_group(place, gpu)
    assert not torch_groups.blocks() and group.made.config.blocking is None
    assert group.variables["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7"


@pytest.mark.parametrize(
    ("torch_has", "asked", "taken"),
    [
        ("2.13", "1", "nccl-legacy"),
        ("2.14", None, "nccl-legacy"), ("2.14", "0", "nccl-legacy"), ("2.14", "1", "nccl2"),
        ("2.15", None, "nccl2"), ("2.15", "1", "nccl2"), ("2.15", "0", "nccl-legacy"),
    ],
)  # fmt: skip
def test_the_group_is_the_one_that_torch_takes_for_nccl(
    environment: pytest.MonkeyPatch, torch_has: str, asked: str | None, taken: str
) -> None:
    if torch_has != "2.15":
        environment.delattr(Made.Options, "lazy_init")
    environment.setattr(dist, "ProcessGroupNCCL", Made, raising=False)
    environment.setattr(dist, "ProcessGroupNCCL2", type("Made2", (Made,), {}), raising=False)
    if torch_has == "2.13":
        environment.delattr(dist, "ProcessGroupNCCL2")
    environment.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if asked is not None:
        environment.setenv("TORCH_DIST_USE_NCCL2", asked)
    environment.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "7")
    assert torch_groups.kind_of_group() == taken
    first, later = (SimpleNamespace(store=None, rank=0, size=1, deadline=soon(bound), hints={}) for bound in (5, 50))
    for place, bound in ((first, 5), (later, 50)):
        group = torch_groups.make_group(place, torch.device("cuda", 1))  # type: ignore[arg-type]
        assert type(group) is (dist.ProcessGroupNCCL2 if taken == "nccl2" else Made)
        assert bound - 1 < group.made._timeout.total_seconds() <= bound, "each communicator has its own bound"
        assert group.variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2", "a failure does not end the process"
        assert group.made.config.blocking == (0 if taken == "nccl2" else None)
        if taken == "nccl2":
            assert group.device == (torch.device("cuda", 1) if torch_has == "2.15" else None)
            assert getattr(group.made, "lazy_init", None) == (True if torch_has == "2.15" else None)


PROGRAM = """
import os, sys, time
from types import SimpleNamespace
import torch, torch.distributed as dist
from holdfast.backends.nccl import torch_groups
from holdfast.backends.nccl.transport import probe
place = SimpleNamespace(store=dist.HashStore(), rank=0, size=1, deadline=time.monotonic() + 9, hints={})
group = torch_groups.make_group(place, torch.device("cuda", 0))
torch_groups.set_timeout(group, 3.0)
print(torch_groups.kind_of_group(), type(group).__name__, group.get_error().name, group.options._timeout, probe("nccl"))
sys.stdout.flush()
os._exit(0)  # to destroy it takes a driver
"""


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="a torch with nccl2: 2.15 (make torch-2.15.0)")
def test_torchs_own_nccl2_is_made_and_bounded_as_its_stand_in_is() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.stdout.startswith("nccl2 ProcessGroupNCCL2 SUCCESS 0:00:03"), run.stderr


# Devices ------------------------------------------------------------------------------------------------------------


def context(rank: int, device: str, hosts: str = "aaaa", **more: Any) -> Any:
    peers = tuple(Peer(host, 100 + number, 1) for number, host in enumerate(hosts))
    more = {"deadline": soon(), "store": dist.HashStore(), "over": lambda: None} | more
    return SimpleNamespace(rank=rank, size=len(peers), device=torch.device(device), peers=peers, **more)


@pytest.mark.parametrize(
    ("rank", "hosts", "gpus", "local_rank", "current", "expected"),
    [
        (3, "aaaa", 4, "", 0, 3),
        (3, "aabb", 2, "", 0, 1),
        (2, "aaaa", 4, "1", 0, 1),
        (2, "aaaa", 3, "7", 0, 2),
        (2, "aaaa", 4, "1", 3, 3),
        (2, "aaaa", 1, "2", 0, 0),
    ],
)
def test_plain_cuda_gives_each_rank_of_a_host_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, rank: int, hosts: str, gpus: int, local_rank: str, current: int, expected: int
) -> None:
    monkeypatch.setattr(nccl, "count_gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert nccl.own_device(context(rank, "cuda", hosts)) == torch.device("cuda", expected)


def test_a_rank_without_a_gpu_of_its_own_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "count_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ValueError, match=r"rank 3 uses: it is number 3 of its host, LOCAL_RANK=3.*2 GPUs"):
        nccl.own_device(context(3, "cuda"))
    with pytest.raises(ValueError, match=r"'cuda:5', but torch sees 2 GPUs"):
        nccl.own_device(context(0, "cuda:5"))
    assert nccl.own_device(context(0, "cuda:1")) == torch.device("cuda", 1)


@pytest.mark.parametrize("listed", [2, -1], ids=["the driver's library says", "a child is asked"])
def test_probing_does_not_touch_cuda_in_this_process(monkeypatch: pytest.MonkeyPatch, listed: int) -> None:
    def poisoned(*_: Any) -> int:
        raise AssertionError("this process can fork no child that uses CUDA any more")

    for name in ("_cuda_getDeviceCount", "_cuda_init"):
        monkeypatch.setattr(torch._C, name, poisoned, raising=False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", poisoned)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: listed)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="2\n"))
    nccl._asked_in_a_child.cache_clear()
    found = nccl.probe("nccl")
    nccl._asked_in_a_child.cache_clear()
    assert isinstance(found, Available) and "NCCL 2.28.9, 2 GPUs" in str(found)


def test_streams_are_those_of_the_communicators_device_whatever_device_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Queue:
        def __init__(self, device: torch.device) -> None:
            self.device, self.after = device, list[Any]()

        def wait_stream(self, other: Any) -> None:
            self.after.append(other)

        wait_event = wait_stream

        def __enter__(self) -> None:
            self.before, cuda.at = cuda.at, self.device

        def __exit__(self, *error: object) -> None:
            cuda.at = self.before

    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    current, asked = [Queue(first), Queue(second)], list[torch.device]()
    cuda: Any = SimpleNamespace(at=first, Stream=Queue)
    cuda.Event = lambda: SimpleNamespace(record=lambda stream: None, query=lambda: True)
    cuda.current_stream = lambda number=None: current[cuda.at.index if number is None else number]
    cuda.is_current_stream_capturing = lambda: bool(asked.append(cuda.at))
    monkeypatch.setattr(streams, "_cuda", cuda)
    work = streams.SideStream(second, lambda: None).launch("all_reduce", lambda: None)
    work.wait()
    assert len(current[1].after) == 1 and current[0].after == []
    assert asked == [second] and cuda.at == first
