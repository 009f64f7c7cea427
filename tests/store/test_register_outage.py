"""A register that is away for less than a store's timeout costs waiting, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.ft.registers import RegisterAway
from holdfast.ft.registers.etcd import OtherCluster
from holdfast.store import StoreTimeout, WeightStore
from holdfast.store.cancellation import Cancellation
from holdfast.store.errors import CallCancelled
from support.waiting import PATIENCE, eventually

STATE = {"a": torch.ones(8)}


class Register:
    """A register in files, which can be moved away and back."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite://{folder}/job.sqlite"
        self._folder, self._away = folder, folder.with_name(folder.name + "-away")

    def leave(self) -> None:
        self._away.mkdir()
        for file in self._folder.iterdir():
            file.rename(self._away / file.name)

    def come_back(self) -> None:
        for file in self._away.iterdir():
            file.rename(self._folder / file.name)


@pytest.fixture
def register(tmp_path: Path) -> Register:
    folder = tmp_path / "register"
    folder.mkdir(mode=0o700)
    return Register(folder)


@pytest.fixture
def store(register: Register) -> Iterator[WeightStore]:
    with WeightStore(register.url, replicas=1, timeout=60.0) as opened:
        opened.publish(1, STATE)
        yield opened


CALLS: dict[str, Callable[[WeightStore], Any]] = {
    "latest": lambda store: store.latest(),
    "get": lambda store: store.get(1, {"a": torch.zeros(8)}),
    "publish": lambda store: store.publish(2, STATE),
    "pin": lambda store: store.pin(1).release(),
    "wait": lambda store: store.wait(1),
}


def test_every_call_goes_on_once_the_register_is_back(register: Register, store: WeightStore) -> None:
    register.leave()
    with ThreadPoolExecutor(len(CALLS)) as pool:
        running: dict[str, Future[Any]] = {name: pool.submit(call, store) for name, call in CALLS.items()}
        eventually(lambda: store._catalog_client._away_since is not None)
        assert not any(each.done() for each in running.values())
        register.come_back()
        for each in running.values():
            each.result(30.0)
    assert store.versions() == [1, 2]


def test_a_longer_outage_is_a_typed_error(register: Register) -> None:
    with WeightStore(register.url, replicas=1, timeout=0.3) as store:
        register.leave()
        for call in CALLS.values():
            with pytest.raises(RegisterAway):
                call(store)
        register.come_back()
        assert store.latest() is None


def test_no_call_waits_for_the_register_past_its_own_timeout(register: Register, store: WeightStore) -> None:
    register.leave()
    with pytest.raises(RegisterAway):
        store.get(1, {"a": torch.zeros(8)}, timeout=0.1)
    with pytest.raises(StoreTimeout, match="is away"):
        store.wait(2, 0.1)
    assert not store._catalog_client.gave_up
    register.come_back()


def test_a_call_that_is_cancelled_does_not_wait_for_its_register(register: Register, store: WeightStore) -> None:
    cancellation = Cancellation("latest")

    def ask() -> int | None:
        with cancellation.scope():
            return store.latest()

    register.leave()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask)
        eventually(lambda: store._catalog_client._away_since is not None)
        cancellation.cancel()
        with pytest.raises(CallCancelled):
            running.result(PATIENCE)
    register.come_back()


def test_what_waiting_cannot_mend_is_raised_at_once(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: object) -> None:
        raise OtherCluster(store.url, "another cluster")

    with monkeypatch.context() as patched:
        patched.setattr(store._catalog_client._cell, "read", other)
        with pytest.raises(OtherCluster):
            store.latest()


def test_a_store_that_closes_does_not_wait_for_its_register(register: Register) -> None:
    store = WeightStore(register.url, replicas=1, timeout=600.0)
    register.leave()
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(30.0)
    assert not closing.is_alive()
    register.come_back()


def test_a_register_that_was_closed_is_not_said_to_be_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with WeightStore(f"sqlite://{tmp_path}/job.sqlite", timeout=30.0) as store:
        client = store.open_catalog()
        client.close()
        with pytest.raises(RegisterAway, match="closed"):
            client.read()
    assert not caplog.records
