"""The plugin registry: which plugins it accepts, which it refuses and why, and observers of ops."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, HoldfastError, Mismatch, PeerFailed, Unsupported
from holdfast.comms.plugins import spec
from holdfast.comms.plugins.hints import Hint, parse_hints
from holdfast.comms.plugins.registry import InvalidPlugin, Registry, registry
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities, OpEvent, hookimpl
from holdfast.comms.rendezvous import fetch
from holdfast.comms.transport.base import Context, Transport
from support.comms.meeting import alone, registered
from support.comms.ranks import on_ranks, on_ranks_of, shared_ranks
from support.source_tree import modules, parsed
from support.waiting import becomes_true, eventually

GOOD = BackendInfo("mine", API_VERSION, "a test", Capabilities(), Available, lambda context: None)  # type: ignore[arg-type, return-value]


def plugin_of(*infos: Any) -> Any:
    return SimpleNamespace(holdfast_backends=hookimpl(lambda: list(infos)))


def test_no_installed_plugin_is_broken() -> None:
    assert not registry().broken


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ("mine", "must return BackendInfo"),
        (dataclasses.replace(GOOD, name="My Backend"), "not a backend name"),
        (dataclasses.replace(GOOD, name="other"), "registered already"),
        (dataclasses.replace(GOOD, api=(0, 9)), "too old"),
        (dataclasses.replace(GOOD, api=(API_VERSION[0], API_VERSION[1] + 1)), "too new"),
        (dataclasses.replace(GOOD, api=(API_VERSION[0] + 1, 0)), "too new"),
        (dataclasses.replace(GOOD, api="1.0"), r"must be \(major, minor\)"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, probe=None), "probe must be callable"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, connect="x"), "connect must be callable"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, connect=None), "neither connect nor memory"),
        (dataclasses.replace(GOOD, capabilities={}), "Capabilities"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, auto=100), "auto must map"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, auto={"cpu": "first"}), "auto must map"),  # type: ignore[dict-item]
        (dataclasses.replace(GOOD, links=(1e-6,)), "Link objects"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, hints=["spins"]), "tuple of Hint objects"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, hints=("spins",)), "hints must be Hint objects, not str"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, hints=(Hint("No", int, "x"),)), "not the name of a hint"),
        (dataclasses.replace(GOOD, hints=(Hint("a", int, "x"), Hint("a", int, "x"))), "'a' twice"),
        (dataclasses.replace(GOOD, hints=(Hint("a", int, "x", 7, most=5),)), "its default does not fit"),
    ],
)
def test_a_malformed_plugin_adds_nothing(info: Any, said: str) -> None:
    fresh = Registry()
    other = dataclasses.replace(GOOD, name="other")
    with pytest.raises(InvalidPlugin, match=said):
        fresh.register(plugin_of(other, info))
    assert not fresh.backends


def test_a_plugin_of_the_version_before_is_accepted(tmp_path: Path) -> None:
    """It announces neither priority nor costs nor hints, and reads the store without naming peers to watch."""
    inner = registry().backends["inproc"].connect
    assert inner is not None

    def connect_as_before(context: Context) -> Transport:
        context.store.set("key", "value")
        assert fetch(context.store, "key", context.deadline) == b"value"
        return inner(context)

    before = BackendInfo("before", (1, 0), "a test", GOOD.capabilities, Available, connect_as_before)
    with registered(plugin_of(before)):
        with alone(tmp_path, "before") as comm:
            comm.barrier()
            assert (comm.backend, dict(comm.info.hints)) == ("before", {})
        assert "before" not in registry().by_priority("cpu")


@pytest.mark.parametrize(("priority", "order"), [(1000, "mine shm gloo"), (60, "shm mine gloo"), (-5, "shm gloo")])
def test_auto_takes_the_backend_of_the_highest_priority(priority: int, order: str, tmp_path: Path) -> None:
    mine = dataclasses.replace(registry().backends["shm"], name="mine", auto={"cpu": priority})
    with registered(plugin_of(mine)), alone(tmp_path, "auto") as comm:
        assert comm.backend == order.split()[0]
        assert registry().by_priority("cpu")[:3] == order.split()


@on_ranks_of("pair")
def test_auto_falls_to_what_all_ranks_have(comm: comms.Communicator, tmp_path: Path) -> None:
    """Ranks on other hosts may lack a plugin that comes first here."""
    plugin = plugin_of(dataclasses.replace(registry().backends["shm"], name="mine", auto={"cpu": 1000}))
    own, place = registered(plugin) if comm.rank == 0 else nullcontext(), f"file://{tmp_path}/meeting"
    with own, comms.connect(rank=comm.rank, size=2, rendezvous=place) as made:
        assert made.backend == "shm"


def test_the_core_names_no_backend() -> None:
    """Texts of `comms` outside of documentation: a backend states itself what the core has to know of it."""
    names = "|".join(registry().backends)
    word = re.compile(rf"(?<![\w./-])({names})(?![\w-])")
    found = []
    for path in modules():
        if path.parts[0] != "comms":
            continue
        tree = parsed(path)
        documentation = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        found += [
            f"{path}:{node.lineno}: {node.value!r}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
            if word.search(node.value)
        ]
    assert not found, "\n".join(found)


def test_a_broken_plugin_or_one_whose_name_is_taken_does_not_break_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> None:
        raise ImportError("libmine.so is missing")

    points = [
        SimpleNamespace(name="broken", load=explode),
        SimpleNamespace(name="good", load=lambda: plugin_of(GOOD)),
        SimpleNamespace(name="old", load=lambda: plugin_of(dataclasses.replace(GOOD, name="old", api=(0, 1)))),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    fresh = Registry()
    fresh.load()
    assert list(fresh.backends) == ["mine"]
    assert "libmine.so is missing" in fresh.broken["broken"] and "too old" in fresh.broken["old"]
    with pytest.raises(comms.BackendUnavailable, match=r"libmine\.so"):
        fresh.backend("broken")
    with pytest.raises(InvalidPlugin, match="registered already"):
        fresh.register(plugin_of(GOOD))
    assert list(fresh.backends) == ["mine"]


def test_a_backend_that_cannot_run_here_or_whose_probe_raises_is_refused_with_the_reason() -> None:
    """Before it looks for a meeting place."""

    def fails() -> Available:
        raise OSError("no such device")

    no_card = spec.Unavailable("no card", "buy one")
    for probe, said in ((lambda: no_card, "no card.*buy one"), (fails, "no such device")):
        plugin = plugin_of(dataclasses.replace(GOOD, probe=probe))
        with registered(plugin), pytest.raises(comms.BackendUnavailable, match=said):
            comms.connect("mine", rank=0, size=1)


def test_observers_see_every_op_begin_and_end_and_the_abort(fast_paths: None, tmp_path: Path) -> None:
    """Also those of the fast path, which an op has taken before an observer is there."""
    seen, aborts, tensor = list[tuple[str, OpEvent]](), list[object](), torch.ones(10)

    class Observer:
        @hookimpl
        def before_op(self, event: OpEvent) -> None:
            seen.append(("before", event))

        @hookimpl
        def after_op(self, event: OpEvent) -> None:
            seen.append(("after", event))

        @hookimpl
        def on_abort(self, event: spec.AbortEvent) -> None:
            aborts.append(event.error)

    with alone(tmp_path, "inproc", name="seen") as comm:
        comm.barrier()
        assert not registry().observed
        with registered(Observer()):
            assert registry().observed
            comm.all_reduce(tensor)
            comm.barrier(async_op=True).wait()
            comm.abort("enough")
            with pytest.raises(comms.Revoked):
                comm.barrier()
        assert not registry().observed
    names = [(when, event.op) for when, event in seen]
    assert names == [("before", "all_reduce"), ("after", "all_reduce"), ("before", "barrier"), ("after", "barrier")]
    after = seen[1][1]
    assert (after.communicator, after.nbytes, after.seq, after.rank, after.error) == ("seen", 40, 2, 0, None)
    assert after.seconds > 0 and after.outputs[0].data_ptr() == tensor.data_ptr()
    assert [type(error) for error in aborts] == [comms.Revoked]


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


def test_ops_take_only_the_hints_of_ops(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="ops over 'shm' has none"):
        comm.all_reduce(torch.ones(2), hints={"algorithm": "ring"})
    assert parse_hints("mine", ALL, {"rate": 1}, per_op=True) == {"rate": 1.0}
    with pytest.raises(ValueError, match="unknown hint 'spins': ops over 'mine' has rate"):
        parse_hints("mine", ALL, {"spins": 1}, per_op=True)
    with pytest.raises(TypeError, match="mapping"):
        parse_hints("mine", ALL, ["spins"])  # type: ignore[arg-type]


def test_info_has_the_hints_in_force_and_a_preference_takes_the_first_backend_that_has_them(tmp_path: Path) -> None:
    with alone(tmp_path, "gloo", hints={"threads": "1"}) as comm:
        assert comm.info.hints == {"threads": 1, "interface": None}
        with comm.split([0], hints={"threads": 3}) as part, part.split([0]) as inherits:
            assert (part.info.hints["threads"], inherits.info.hints["threads"]) == (3, 3)
        with pytest.raises(ValueError, match="unknown hint 'spins'"):
            comm.split([0], hints={"spins": 3})
    with alone(tmp_path / "..", "gloo", name="plain") as comm:
        assert comm.info.hints == {"threads": 2, "interface": None}
    with alone(tmp_path, "auto", hints={"threads": 1}) as comm:
        assert comm.backend == "gloo"
    with pytest.raises(ValueError, match=r"'shm' has spins, yields.*'gloo' has interface, threads"):
        alone(tmp_path, "shm,gloo", hints={"threads": 1, "spins": 1})


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
        with alone(tmp_path, "gloo", name=f"with {number}", hints={"threads": number, "interface": "lo"}):
            becomes_true(lambda: len(threads() - before) == number)  # a thread names itself once it runs
            new = threads() - before
        assert becomes_true(lambda: new.isdisjoint(threads())), "else the next count has them"
        return len(new)

    assert (added(1), added(4)) == (1, 4)
    with pytest.raises(HoldfastError, match="no network interface 'nowhere0'; it has lo"):
        alone(tmp_path, "gloo", name="nowhere", hints={"interface": "nowhere0"})


pair = shared_ranks(2, "shm")


@on_ranks_of("pair")
def test_a_rank_that_yields_soon_looks_whether_the_others_are_there(comm: Communicator) -> None:
    """On a busy machine a yield takes as long as others compute; its own processor time is the same everywhere."""
    with comm.split([0, 1], hints={"spins": 0, "yields": 10_000_000}) as part:
        part.barrier()
        if part.rank == 1:
            began = time.thread_time()
            with pytest.raises(PeerFailed, match="it left the communicator"):
                part.barrier()
            assert time.thread_time() - began < 0.1


@on_ranks_of("pair")
def test_a_rank_sleeps_while_it_waits_unless_it_may_spin(comm: Communicator) -> None:
    """The kernel counts how often a thread gave the processor up by itself: a sleep does, a spin does not."""
    waiting = psutil.Process(comm.all_gather_object(os.getpid())[1])

    def sleeps() -> int:
        return int(waiting.num_ctx_switches().voluntary)

    def computed() -> float:
        return float(sum(waiting.cpu_times()[:2]))

    def grows(counter: Callable[[], float], by: float) -> None:
        until = counter() + by
        eventually(lambda: counter() >= until)

    used = []
    for spins, counter, enough in ((0, sleeps, 40), (10_000_000, computed, 0.1)):
        with comm.split([0, 1], hints={"spins": spins, "yields": 0}) as part:
            part.barrier()
            if part.rank == 0:
                grows(counter, enough)
                part.barrier()
            else:
                slept, began = sleeps(), time.thread_time()
                part.barrier()
                used.append(time.thread_time() - began)
                assert (sleeps() - slept < 20) == (spins > 0)
    assert comm.rank == 0 or used[0] < used[1] / 3


@on_ranks(4, "ucx", checks="1")
def test_an_op_may_name_its_algorithm(comm: Communicator) -> None:
    tensor = torch.ones(64)
    for algorithm, rounds in (("doubling", 2), ("ring", 6)):
        comm.all_reduce(tensor, hints={"algorithm": algorithm}, async_op=algorithm == "ring").wait()
        assert comm._transport._rounds == rounds  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match="broadcast by the algorithm 'bruck'; it has binomial, pipeline"):
        comm.broadcast(tensor, 0, hints={"algorithm": "bruck"})
    with pytest.raises(ValueError, match="ops over 'ucx' has algorithm"):
        comm.barrier(hints={"spins": 1})
    comm.barrier()
    assert tensor[:1].tolist() == [16.0]
    with pytest.raises(Mismatch, match=r"with hints \{'algorithm': 'ring'\}"):  # `checks`: ranks compare ops first
        comm.all_reduce(tensor, hints={"algorithm": "ring" if comm.rank else "doubling"})


TRANSPORTS = {
    "inproc": "memory of one process",
    "shm": "shared memory",
    "gloo": "tcp",
    "ucx": "posix,cma,self",
    "mpi": "Open MPI",
}


@on_ranks_of("two_ranks")
def test_info_says_what_a_communicator_is(comm: Communicator) -> None:
    info = comm.info
    assert (info.name, info.backend, info.rank, info.size) == (comm.name, comm.backend, comm.rank, comm.size)
    assert (info.epoch, info.transport) == (comm.epoch, TRANSPORTS[comm.backend])
    assert info.devices == (torch.device("cpu"),) and info.ranks == (0, 1)
    assert len(info.hosts) == 2 and len(set(info.hosts)) == 1
    assert info.library_version and set(info.options) == {"timeout", "check"} and info.options["check"] is True
    assert comm.backend != "ucx" or info.library_version.startswith("UCX 1.")
