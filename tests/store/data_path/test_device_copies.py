"""Copies between parts and devices, over a stand-in for the calls of CUDA: tensors that pass for a device's."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.backends.inproc.memory_plane import InprocPlane
from holdfast.comms.errors import Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.tensors.plain_tensors import PlainTensors
from holdfast.store import WeightStore
from holdfast.store.data import device_copy, tree
from holdfast.store.data.device_copy import Cuda, HostCopy, Registrations, to_host
from holdfast.store.data.digests import copy_and_digest
from holdfast.store.read import filling

Tensor = torch.Tensor


class FakeCuda(Cuda):
    """Tensors that `put` made pass for tensors of a device. `log` has what was asked of streams and events."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.registered: dict[int, bool] = {}
        """The registered mappings, and whether they are writable."""
        self.times = 0
        self.refusal = ""
        self.before_copy: Callable[[], object] = bool
        self._spans: list[Tensor] = []

    def put(self, tensor: Tensor) -> Tensor:
        self._spans.append(tensor)
        return tensor

    def has(self, tensor: Tensor) -> bool:
        storages = {each.untyped_storage().data_ptr() for each in self._spans}
        return tensor.untyped_storage().data_ptr() in storages

    def in_use(self) -> bool:
        return True

    def register(self, address: int, nbytes: int, writable: bool) -> str:
        assert address not in self.registered
        self.times += 1
        if not self.refusal:
            self.registered[address] = writable
        return self.refusal

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def stream(self, device: torch.device) -> Any:
        return SimpleNamespace(
            wait_stream=lambda other: self.log.append("copies wait for the program"),
            record_event=self._event,
            synchronize=lambda: self.log.append("all done"),
        )

    def _event(self) -> Any:
        self.log.append("queued")
        return SimpleNamespace(synchronize=lambda: self.log.append("arrived"))

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("the program waits for copies"))

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.before_copy()
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    def described(tensors: dict[str, Tensor]) -> object:
        return None if any(map(fake.has, tensors.values())) else PlainTensors.of(tensors)

    monkeypatch.setattr(device_copy, "cuda", fake)
    monkeypatch.setattr(device_copy, "registrations", registrations := Registrations(fake))
    for module in ("data.packing", "read.filling"):
        monkeypatch.setattr(f"holdfast.store.{module}.registrations", registrations)
    monkeypatch.setattr(tree, "PlainTensors", SimpleNamespace(of=described))
    return fake


def a_state() -> dict[str, Tensor]:
    """Large and small tensors of several dtypes, in order and not; two are not on the device."""
    generator = torch.Generator().manual_seed(1)
    return {
        "large": torch.randn(1_200_001, generator=generator),
        "half": torch.randn(400, 1000, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(300, 400, generator=generator).t(),
        "bytes": torch.randint(0, 256, (700_001,), generator=generator).to(torch.uint8),
        "small": torch.arange(7),
        "odd": torch.arange(13, dtype=torch.uint8),
        "complex": torch.randn(50, dtype=torch.complex64, generator=generator).conj(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "of the host": torch.arange(5.0),
        "large of the host": torch.randn(100_000, generator=generator),
    }


def on_the_device(cuda: FakeCuda, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each if "host" in name else cuda.put(each) for name, each in state.items()}


def blank(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(each) for name, each in state.items()}


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.fixture
def refusing(cuda: FakeCuda) -> None:
    cuda.refusal = "out of memory"


@pytest.mark.parametrize("atomic", [False, True])
def test_tensors_of_a_device_are_published_and_got(tmp_path: Path, cuda: FakeCuda, atomic: bool) -> None:
    state = on_the_device(cuda, a_state())
    with WeightStore(f"memory://{tmp_path}") as store:
        store.publish(1, state)
        check(store.load(1), state)
        into = on_the_device(cuda, blank(state))
        store.get(1, into, atomic=atomic)
        check(into, state)


def test_what_cannot_be_mapped_is_read_for_a_device(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(plane: InprocPlane, handle: Handle, *, lasting: bool) -> Tensor:
        raise Unsupported("mapping", "read it")

    monkeypatch.setattr(InprocPlane, "map", refuse)
    state = on_the_device(cuda, a_state())
    with WeightStore(f"memory://{tmp_path}") as store:
        for version in (1, 2):
            store.publish(version, state)
            into = on_the_device(cuda, blank(state))
            store.get(version, into)
            check(into, state)


def test_each_mapping_is_registered_once_and_until_it_goes(tmp_path: Path, cuda: FakeCuda) -> None:
    state = on_the_device(cuda, a_state())
    with WeightStore(f"memory://{tmp_path}") as store:
        for version in range(1, 9):
            store.publish(version, state)
            store.get(version, on_the_device(cuda, blank(state)))
        own, mapped = (sum(writable is kind for writable in cuda.registered.values()) for kind in (True, False))
        assert 1 <= own <= 5, "the pool has the memory of two versions, of the next one, and two ahead"
        assert 1 <= mapped <= own, "what is read is mapped once more, to be read alone"
        assert cuda.times <= 10
    gc.collect()
    assert cuda.registered == {}


def test_what_is_expected_is_registered_before_it_is_published(tmp_path: Path, cuda: FakeCuda) -> None:
    with WeightStore(f"memory://{tmp_path}", expect=4 << 20) as store:
        toucher = store._replica_holder.pool._toucher
        if toucher is not None:
            toucher.join(60)
        assert cuda.times == 2, "of the next two versions"
        store.publish(1, {"w": cuda.put(torch.ones(1 << 20))})
        assert len(cuda.registered) == 3 or cuda.times == 2


def test_a_refusal_is_said_once_and_the_bytes_are_right(
    tmp_path: Path, cuda: FakeCuda, refusing: None, caplog: pytest.LogCaptureFixture
) -> None:
    state = on_the_device(cuda, a_state())
    with caplog.at_level(logging.WARNING), WeightStore(f"memory://{tmp_path}") as store:
        for version in (1, 2, 3):
            store.publish(version, state)
            into = on_the_device(cuda, blank(state))
            store.get(version, into)
            check(into, state)
    said = [each.getMessage() for each in caplog.records if "cudaHostRegister" in each.getMessage()]
    assert len(said) == 1
    assert "'out of memory'" in said[0] and "ulimit -l" in said[0]


def test_bytes_are_digested_while_the_next_ones_are_copied(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies are queued before the first is waited for; the program's stream is waited for before the first."""
    monkeypatch.setattr(device_copy, "GROUP_BYTES", 100)
    copies = [HostCopy(torch.ones(60), torch.zeros(60), 240 * (number + 1)) for number in range(3)]
    to_host(copies, lambda end: cuda.log.append(f"digest {end}"))
    arrivals = [line for end in (240, 480, 720) for line in ("arrived", f"digest {end}")]
    assert cuda.log == ["copies wait for the program", *["queued"] * 3, *arrivals, "all done"]
    assert all(torch.equal(copy.source, copy.target) for copy in copies)


def test_copies_are_over_before_an_error_leaves_the_call(cuda: FakeCuda) -> None:
    def fail(end: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_host([HostCopy(torch.ones(6), torch.zeros(6), 24)], fail)
    assert cuda.log[-1] == "all done"


def test_a_version_that_goes_while_it_is_copied_is_not_taken(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's checksums hold for what the device got as long as the region is open."""
    state = on_the_device(cuda, a_state())
    with WeightStore(f"memory://{tmp_path}", keep=1) as store:
        store.publish(1, state)
        newer = on_the_device(cuda, {name: each.clone() for name, each in a_state().items()})
        newer["small"] += 1

        def supersede(*arguments: Any) -> Any:
            monkeypatch.setattr(filling, "copy_and_digest", copy_and_digest)
            store.publish(2, newer)
            return copy_and_digest(*arguments)

        monkeypatch.setattr(filling, "copy_and_digest", supersede)
        into = on_the_device(cuda, blank(state))
        assert store.get("latest", into) == 2
        check(into, newer)
