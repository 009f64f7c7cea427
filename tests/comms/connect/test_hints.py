"""Hints, and what a communicator says of itself."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.comms import Communicator, HoldfastError, Mismatch, Unsupported
from holdfast.comms.connect import connect
from holdfast.comms.plugins.hints import Hint, parse_hints
from holdfast.harness import LocalCluster
from support.waiting import becomes_true

SPINS = Hint("spins", int, "a test", least=0, most=100)
RATE = Hint("rate", float, "a test", least=0.5, per_op=True)
QUIET = Hint("quiet", bool, "a test", default=False)
PATH = Hint("path", str, "a test", choices=("ring", "tree"))
ALL = (SPINS, RATE, QUIET, PATH)


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ({"spins": 7}, 7),
        ({"spins": "7"}, 7),
        ({"spins": 7.0}, 7),
        ({"rate": 1}, 1.0),
        ({"rate": "1e3"}, 1000.0),
        ({"quiet": True}, True),
        ({"quiet": "false"}, False),
        ({"path": "tree"}, "tree"),
    ],
)
def test_values_may_be_texts_as_in_a_file_of_settings(given: Mapping[str, Any], parsed: object) -> None:
    ((name, value),) = parse_hints("mine", ALL, given).items()
    assert (value, type(value)) == (parsed, type(parsed)) and name in given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"spins": -1}, "hint 'spins' must be an integer from 0 to 100, not -1"),
        ({"spins": 101}, "from 0 to 100"),
        ({"spins": 1.5}, "integer"),
        ({"spins": True}, "integer"),
        ({"spins": "many"}, "integer"),
        ({"spins": None}, "integer"),
        ({"rate": float("nan")}, "a number from 0.5, not nan"),
        ({"quiet": "off"}, "true or false"),
        ({"path": "star"}, "'ring' or 'tree', not 'star'"),
        ({"path": 3}, "'ring' or 'tree'"),
        ({"spin": 1}, "unknown hint 'spin': 'mine' has path, quiet, rate, spins; `holdfast backends --hints`"),
    ],
)
def test_unknown_hints_and_values_are_refused_with_what_there_is(given: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_hints("mine", ALL, given)


def test_ops_take_only_the_hints_of_ops() -> None:
    assert parse_hints("mine", ALL, {"rate": 1}, per_op=True) == {"rate": 1.0}
    with pytest.raises(ValueError, match="unknown hint 'spins': ops over 'mine' has rate"):
        parse_hints("mine", ALL, {"spins": 1}, per_op=True)
    with pytest.raises(TypeError, match="mapping"):
        parse_hints("mine", ALL, ["spins"])  # type: ignore[arg-type]


def alone(backend: str, path: Path, **more: Any) -> Communicator:
    return connect(backend, rank=0, size=1, rendezvous=f"file://{path}/meeting", **more)


def test_bad_hints_are_refused_before_the_ranks_meet(tmp_path: Path) -> None:
    for hints in ({"no_such": 1}, {"spins": -1}):
        with pytest.raises(ValueError, match=r"no_such|spins"):
            alone("shm", tmp_path, hints=hints)
    assert not (tmp_path / "meeting").exists() or alone("shm", tmp_path).size == 1


def test_info_has_the_hints_in_force(tmp_path: Path) -> None:
    with alone("gloo", tmp_path, hints={"threads": "1"}) as comm:
        assert comm.info.hints == {"threads": 1, "interface": None}
        with comm.split([0], hints={"threads": 3}) as part, part.split([0]) as inherits:
            assert (part.info.hints["threads"], inherits.info.hints["threads"]) == (3, 3)
        with pytest.raises(ValueError, match="unknown hint 'spins'"):
            comm.split([0], hints={"spins": 3})
    with alone("gloo", tmp_path / "..", name="plain") as comm:
        assert comm.info.hints == {"threads": 2, "interface": None}


def test_a_preference_takes_the_first_backend_that_has_the_hints(tmp_path: Path) -> None:
    with alone("auto", tmp_path, hints={"threads": 1}) as comm:
        assert comm.backend == "gloo"
    with pytest.raises(ValueError, match=r"'shm' has spins, yields.*'gloo' has interface, threads"):
        alone("shm,gloo", tmp_path, hints={"threads": 1, "spins": 1})


def test_ranks_that_pass_different_hints_are_told() -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(Mismatch) as caught:
            comm.split([0, 1], hints={"spins": comm.rank}, timeout=20.0)
        return str(caught.value)

    with LocalCluster(2, "inproc") as cluster:
        said = cluster.run(body)[0]
    assert "rank 1 passes hint 'spins' as 1, rank 0 as 0" in said


def test_gloo_runs_with_the_threads_and_over_the_interface_that_are_named(tmp_path: Path) -> None:
    def threads() -> set[str]:
        """Those that run gloo's ops; this process may have others, which come and go."""
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                found |= {task.name} if (task / "comm").read_text() == "pt_gloo_runloop\n" else set()
        return found

    def added(number: int) -> int:
        before = threads()
        with alone("gloo", tmp_path, name=f"with {number}", hints={"threads": number, "interface": "lo"}):
            becomes_true(lambda: len(threads() - before) == number)  # a thread names itself once it runs
            new = threads() - before
        assert becomes_true(lambda: new.isdisjoint(threads())), "else the next count has them"
        return len(new)

    assert (added(1), added(4)) == (1, 4)
    with pytest.raises(HoldfastError, match="no network interface 'nowhere0'; it has lo"):
        alone("gloo", tmp_path, name="nowhere", hints={"interface": "nowhere0"})


def test_a_rank_without_spins_and_yields_waits_without_computing() -> None:
    def body(comm: Communicator) -> list[float]:
        used = []
        for checks in (0, 10_000_000) * 3:
            with comm.split([0, 1], hints={"spins": checks, "yields": 0}) as part:
                part.barrier()
                if part.rank == 0:
                    time.sleep(0.2)
                began = time.thread_time()
                part.barrier()
                used.append(time.thread_time() - began)
        return used

    with LocalCluster(2, "shm") as cluster:
        used = cluster.run(body)[1]
    assert sum(used[::2]) < sum(used[1::2]) / 3


def test_an_op_may_name_its_algorithm() -> None:
    def body(comm: Communicator) -> tuple[dict[str, int], list[float]]:
        rounds = {}
        tensor = torch.ones(64)
        for algorithm in ("doubling", "ring"):
            work = comm.all_reduce(tensor, hints={"algorithm": algorithm}, async_op=algorithm == "ring")
            work.wait()
            rounds[algorithm] = comm._transport._rounds  # type: ignore[attr-defined]
        with pytest.raises(Unsupported, match="broadcast by the algorithm 'bruck'; it has binomial, pipeline"):
            comm.broadcast(tensor, 0, hints={"algorithm": "bruck"})
        with pytest.raises(ValueError, match="ops over 'ucx' has algorithm"):
            comm.barrier(hints={"spins": 1})
        comm.barrier()
        return rounds, tensor[:1].tolist()

    with LocalCluster(4, "ucx") as cluster:
        assert cluster.run(body) == [({"doubling": 2, "ring": 6}, [16.0])] * 4


def test_ranks_that_name_different_algorithms_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CHECK", "1")

    def body(comm: Communicator) -> str:
        with pytest.raises(Mismatch) as caught:
            comm.all_reduce(torch.ones(2), hints={"algorithm": "ring" if comm.rank else "doubling"})
        return str(caught.value)

    with LocalCluster(2, "ucx") as cluster:
        assert "with hints {'algorithm': 'ring'}" in cluster.run(body)[0]


def test_no_other_backend_takes_hints_of_ops_silently(tmp_path: Path) -> None:
    with alone("shm", tmp_path) as comm, pytest.raises(ValueError, match="ops over 'shm' has none"):
        comm.all_reduce(torch.ones(2), hints={"algorithm": "ring"})


TRANSPORTS = {
    "inproc": "memory of one process",
    "shm": "shared memory",
    "gloo": "tcp",
    "ucx": "posix,cma,self",
    "mpi": "Open MPI",
}


def test_info_says_what_a_communicator_is(two_ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> Any:
        info = comm.info
        assert (info.name, info.backend, info.rank, info.size, info.epoch) == (
            comm.name,
            comm.backend,
            comm.rank,
            comm.size,
            comm.epoch,
        )
        assert info.devices == (torch.device("cpu"),) and info.ranks == (0, 1)
        assert len(info.hosts) == 2 and len(set(info.hosts)) == 1
        assert info.library_version and set(info.options) == {"timeout", "check"} and info.options["check"] is True
        with pytest.raises(dataclasses.FrozenInstanceError):
            info.epoch = 7  # type: ignore[misc]
        with pytest.raises(TypeError):
            info.options["timeout"] = 1.0  # type: ignore[index]
        return info.backend, info.transport

    (backend, transport), again = two_ranks.run(body)
    assert transport == TRANSPORTS[backend] and again == (backend, transport)


def test_a_split_has_the_name_and_members_that_were_given(three_ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> Any:
        part = comm.split([2, 0], name="ends")
        if part is None:
            return None
        with part:
            total = torch.tensor([float(comm.rank)])
            part.all_reduce(total)
            return part.name, part.info.name, part.info.ranks, part.rank, total.item()

    assert three_ranks.run(body) == [("ends", "ends", (2, 0), 1, 2.0), None, ("ends", "ends", (2, 0), 0, 2.0)]


def test_ranks_that_are_left_out_get_none_and_need_not_call() -> None:
    def body(comm: Communicator) -> list[bool]:
        none = [comm.split([1 - comm.rank]) is None, comm.split(None) is None]
        with comm.split([comm.rank]) as alone:
            none.append(alone.size == 1)
        comm.barrier()
        return none

    with LocalCluster(2, "inproc") as cluster:
        assert cluster.run(body) == [[True] * 3] * 2


def test_a_split_refuses_bad_names_and_ranks_before_the_ranks_meet() -> None:
    def body(comm: Communicator) -> str:
        for name in ("", "n" * 201, 7, comm.name):
            with pytest.raises(ValueError, match="name must be a new one, of 1 to 200 characters"):
                comm.split([0, 1], name=name)  # type: ignore[call-overload]
        for ranks in ([], [0, 0], [2], [-1]):
            with pytest.raises(ValueError, match="ranks"):
                comm.split(ranks)
        with pytest.raises(Mismatch, match=r"passes name as '[ab]', rank [01] as '[ab]'"):
            comm.split([0, 1], name="ab"[comm.rank], timeout=20.0)
        comm.barrier()
        return "usable"

    with LocalCluster(2, "inproc") as cluster:
        assert cluster.run(body) == ["usable"] * 2
