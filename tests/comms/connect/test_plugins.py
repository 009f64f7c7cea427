"""The plugin registry: which plugins it accepts, which it refuses and why, and observers of ops."""

from __future__ import annotations

import ast
import dataclasses
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast import comms
from holdfast.comms.plugins.hints import Hint
from holdfast.comms.plugins.registry import InvalidPlugin, Registry, registry
from holdfast.comms.plugins.spec import (
    API_VERSION,
    AbortEvent,
    Available,
    BackendInfo,
    Capabilities,
    OpEvent,
    Unavailable,
    hookimpl,
)
from holdfast.comms.rendezvous import fetch
from holdfast.comms.transport.base import Context, Transport
from holdfast.harness import LocalCluster
from support.source_tree import modules, parsed

GOOD = BackendInfo(
    name="mine",
    api=API_VERSION,
    description="a test",
    capabilities=Capabilities(),
    probe=Available,
    connect=lambda context: None,  # type: ignore[arg-type, return-value]
)


class Plugin:
    def __init__(self, *infos: Any) -> None:
        self._infos = list(infos)

    @hookimpl
    def holdfast_backends(self) -> list[BackendInfo]:
        return self._infos


def test_built_in_backends_are_loaded_through_entry_points() -> None:
    found = comms.backends()
    assert {"inproc", "shm", "gloo"} <= set(found)
    assert all(found[name].available for name in ("inproc", "shm", "gloo"))
    assert "float32" in found["shm"].info.capabilities.reduces["cpu"]
    assert found["inproc"].info.capabilities.one_process
    assert not registry().broken


def test_a_plugin_can_be_registered_and_unregistered() -> None:
    fresh = Registry()
    plugin = Plugin(GOOD)
    fresh.register(plugin)
    assert fresh.backend("mine").available
    fresh.unregister(plugin)
    with pytest.raises(comms.BackendUnavailable, match="unknown"):
        fresh.backend("mine")


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ("mine", "must return BackendInfo"),
        (dataclasses.replace(GOOD, name="My Backend"), "not a backend name"),
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
        fresh.register(Plugin(other, info))
    assert not fresh.backends


def test_a_plugin_of_the_version_before_is_accepted(tmp_path: Path) -> None:
    """It announces neither priority nor costs nor hints, and reads the store without naming peers to watch."""
    inner = registry().backends["inproc"].connect
    assert inner is not None

    def connect_as_before(context: Context) -> Transport:
        context.store.set("key", "value")
        assert fetch(context.store, "key", context.deadline) == b"value"
        return inner(context)

    plugin = Plugin(BackendInfo("before", (1, 0), "a test", GOOD.capabilities, Available, connect_as_before))
    comms.register(plugin)
    try:
        with comms.connect("before", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting") as comm:
            comm.barrier()
            assert (comm.backend, dict(comm.info.hints)) == ("before", {})
        assert "before" not in registry().by_priority("cpu")
    finally:
        comms.unregister(plugin)


@pytest.mark.parametrize(("priority", "taken"), [(1000, "mine"), (60, "shm"), (0, "shm"), (-5, "shm")])
def test_auto_takes_the_backend_of_the_highest_priority(priority: int, taken: str, tmp_path: Path) -> None:
    shm = registry().backends["shm"]
    plugin = Plugin(dataclasses.replace(shm, name="mine", auto={"cpu": priority}))
    comms.register(plugin)
    try:
        with comms.connect(rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting") as comm:
            assert comm.backend == taken
        assert registry().by_priority("cpu")[:3] == {
            1000: ["mine", "shm", "gloo"],
            60: ["shm", "mine", "gloo"],
        }.get(priority, ["shm", "gloo"])
    finally:
        comms.unregister(plugin)


def test_auto_falls_to_what_all_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on other hosts may lack a plugin that comes first here."""

    def body(comm: comms.Communicator) -> str:
        plugin = Plugin(dataclasses.replace(registry().backends["shm"], name="mine", auto={"cpu": 1000}))
        if comm.rank == 0:
            comms.register(plugin)
        path = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None, 0)
        try:
            with comms.connect(rank=comm.rank, size=2, rendezvous=f"file://{path}/meeting") as made:
                return made.backend
        finally:
            if comm.rank == 0:
                comms.unregister(plugin)

    with LocalCluster(2, "shm") as cluster:
        assert cluster.run(body) == ["shm", "shm"]


def test_auto_without_a_backend_for_the_device_says_so() -> None:
    with pytest.raises(comms.BackendUnavailable, match="no backend offers itself for tensors on meta"):
        comms.connect(rank=0, size=1, device="meta")


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


def test_a_second_backend_of_the_same_name_is_refused() -> None:
    fresh = Registry()
    fresh.register(Plugin(GOOD))
    with pytest.raises(InvalidPlugin, match="registered already"):
        fresh.register(Plugin(GOOD))
    with pytest.raises(InvalidPlugin, match="registered already"):
        fresh.register(Plugin(dataclasses.replace(GOOD, name="x"), dataclasses.replace(GOOD, name="x")))
    assert list(fresh.backends) == ["mine"]


def test_a_broken_plugin_does_not_break_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> None:
        raise ImportError("libmine.so is missing")

    points = [
        SimpleNamespace(name="broken", load=explode),
        SimpleNamespace(name="good", load=lambda: Plugin(GOOD)),
        SimpleNamespace(name="old", load=lambda: Plugin(dataclasses.replace(GOOD, name="old", api=(0, 1)))),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    fresh = Registry()
    fresh.load()
    assert list(fresh.backends) == ["mine"]
    assert "libmine.so is missing" in fresh.broken["broken"] and "too old" in fresh.broken["old"]
    with pytest.raises(comms.BackendUnavailable, match=r"libmine\.so"):
        fresh.backend("broken")


def test_a_probe_that_raises_means_unavailable() -> None:
    def probe() -> Available:
        raise OSError("no such device")

    fresh = Registry()
    fresh.register(Plugin(dataclasses.replace(GOOD, probe=probe)))
    status = fresh.backend("mine").status
    assert isinstance(status, Unavailable) and "no such device" in status.reason


def test_a_backend_that_cannot_run_here_is_refused_with_its_hint() -> None:
    plugin = Plugin(dataclasses.replace(GOOD, probe=lambda: Unavailable("no card", "buy one")))
    comms.register(plugin)
    try:
        with pytest.raises(comms.BackendUnavailable, match=r"no card.*buy one"):
            comms.connect("mine", rank=0, size=1)
    finally:
        comms.unregister(plugin)


class Observer:
    def __init__(self) -> None:
        self.seen: list[tuple[str, OpEvent]] = []
        self.aborts: list[object] = []

    @hookimpl
    def before_op(self, event: OpEvent) -> None:
        self.seen.append(("before", event))

    @hookimpl
    def after_op(self, event: OpEvent) -> None:
        self.seen.append(("after", event))

    @hookimpl
    def on_abort(self, event: AbortEvent) -> None:
        self.aborts.append(event.error)


def test_observers_see_every_op_begin_and_end_and_the_abort(fast_paths: None, tmp_path: Path) -> None:
    """Also those of the fast path, which an op has taken before an observer is there."""
    observer = Observer()
    with comms.connect("inproc", rank=0, size=1, rendezvous=f"file://{tmp_path}/m", name="seen") as comm:
        comm.barrier()
        assert not registry().observed
        comms.register(observer)
        try:
            assert registry().observed
            tensor = torch.ones(10)
            comm.all_reduce(tensor)
            comm.barrier(async_op=True).wait()
            comm.abort("enough")
            with pytest.raises(comms.Revoked):
                comm.barrier()
        finally:
            comms.unregister(observer)
        assert not registry().observed
    names = [(when, event.op) for when, event in observer.seen]
    assert names == [("before", "all_reduce"), ("after", "all_reduce"), ("before", "barrier"), ("after", "barrier")]
    after = observer.seen[1][1]
    assert (after.communicator, after.nbytes, after.seq, after.rank, after.error) == ("seen", 40, 2, 0, None)
    assert after.seconds > 0 and after.outputs[0].data_ptr() == tensor.data_ptr()
    assert [type(error) for error in observer.aborts] == [comms.Revoked]
