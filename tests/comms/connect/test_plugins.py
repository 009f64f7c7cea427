"""The plugin registry: which plugins it accepts, which it refuses and why, and observers of ops."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast import comms
from holdfast.comms.plugins.registry import InvalidPlugin, Registry, registry
from holdfast.comms.plugins.spec import (
    API_VERSION,
    Available,
    BackendInfo,
    Capabilities,
    OpEvent,
    Unavailable,
    hookimpl,
)

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
        (dataclasses.replace(GOOD, name="My Backend"), "no backend name"),
        (dataclasses.replace(GOOD, api=(0, 9)), "too old"),
        (dataclasses.replace(GOOD, api=(API_VERSION[0], API_VERSION[1] + 1)), "too new"),
        (dataclasses.replace(GOOD, api=(API_VERSION[0] + 1, 0)), "too new"),
        (dataclasses.replace(GOOD, api="1.0"), r"must be \(major, minor\)"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, probe=None), "probe must be callable"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, connect="x"), "connect must be callable"),  # type: ignore[arg-type]
        (dataclasses.replace(GOOD, connect=None), "neither connect nor memory"),
        (dataclasses.replace(GOOD, capabilities={}), "Capabilities"),  # type: ignore[arg-type]
    ],
)
def test_a_malformed_plugin_adds_nothing(info: Any, said: str) -> None:
    fresh = Registry()
    other = dataclasses.replace(GOOD, name="other")
    with pytest.raises(InvalidPlugin, match=said):
        fresh.register(Plugin(other, info))
    assert not fresh.backends


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

    @hookimpl
    def before_op(self, event: OpEvent) -> None:
        self.seen.append(("before", event))

    @hookimpl
    def after_op(self, event: OpEvent) -> None:
        self.seen.append(("after", event))


def test_observers_see_every_op_begin_and_end(tmp_path: Path) -> None:
    observer = Observer()
    with comms.connect("inproc", rank=0, size=1, rendezvous=f"file://{tmp_path}/m", name="seen") as comm:
        comm.barrier()
        assert not registry().observed
        comms.register(observer)
        try:
            assert registry().observed
            comm.all_reduce(torch.ones(10))
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
    assert after.seconds > 0
