"""Copies between parts and devices, over a stand-in for the calls of CUDA: tensors that pass for a device's."""

from __future__ import annotations

import gc
import importlib.util
import io
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rich.console import Console

from holdfast.backends.inproc.transport import InprocPlane
from holdfast.comms.errors import BackendUnavailable, CorruptData, Unsupported
from holdfast.comms.tensors.memory import PlainTensors
from holdfast.harness.cli.store_tables import holders_table
from holdfast.store import WeightStore, weight_store
from holdfast.store.catalog.records import DeviceAddress
from holdfast.store.data import cuda_copies, state_dicts
from holdfast.store.data.cuda_copies import Cuda, DeviceDigests, HostCopy, Registrations, to_host
from holdfast.store.data.digests import copy_and_digest
from holdfast.store.data.packing import PartBlock, pack
from holdfast.store.read import device_copies, filling
from holdfast.store.read.device_copies import CudaIpc
from holdfast.store.read.filling import PartTargets
from holdfast.store.read.read_plan import local_tensor, plan_read
from holdfast.store.reshard.plan import BoxTarget
from support.waiting import eventually

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
        self.before_digest: Callable[[], object] = bool
        self.digested = 0
        """The pieces whose checksums the device was asked for."""
        self.state: dict[str, Tensor] = {}
        """A state dict of which most is on the device."""
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

    def digest(self, addresses: Any, sizes: Any, device: torch.device, targets: Any = None) -> Any:
        self.before_digest()
        self.digested += len(sizes)
        jobs = np.zeros((len(sizes), 5), np.uint64)
        jobs[:, 0], jobs[:, 1], jobs[:, 2] = addresses, sizes, 0 if targets is None else targets
        sums = copy_and_digest(jobs)
        return lambda: sums

    def stream(self, device: torch.device, kernels: bool = False) -> Any:
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

    monkeypatch.setattr(cuda_copies, "cuda", fake)
    monkeypatch.setattr(cuda_copies, "registrations", registrations := Registrations(fake))
    for module in ("data.packing", "read.filling", "weight_store"):
        monkeypatch.setattr(f"holdfast.store.{module}.registrations", registrations)
    monkeypatch.setattr(cuda_copies, "digests", digests := DeviceDigests(fake))
    monkeypatch.setattr(weight_store, "digests", digests)
    digests.compile(torch.device("cpu"))
    fake.digested = 0
    fake.log.clear()
    monkeypatch.setattr(state_dicts, "PlainTensors", SimpleNamespace(of=described))
    fake.state = on_the_device(fake, a_state())
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


def check_get(store: WeightStore, cuda: FakeCuda, version: int, expected: dict[str, Tensor], **options: bool) -> None:
    """Get the latest version, which is `version`, into other tensors of the device."""
    into = on_the_device(cuda, blank(expected))
    assert store.get("latest", into, **options) == version
    check(into, expected)


@pytest.fixture
def no_kernel(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host computes the checksums."""

    def missing() -> None:
        raise ImportError("No module named 'triton'")

    cuda.before_digest = missing
    monkeypatch.setattr(cuda_copies, "digests", digests := DeviceDigests(cuda))
    monkeypatch.setattr(weight_store, "digests", digests)


def publish_and_get(store: WeightStore, cuda: FakeCuda) -> None:
    """Three versions of a state on the device, each read into other tensors there."""
    for version in (1, 2, 3):
        store.publish(version, cuda.state)
        check_get(store, cuda, version, cuda.state)


@pytest.mark.parametrize("atomic", [False, True])
def test_tensors_of_a_device_are_published_and_got(cuda: FakeCuda, store: WeightStore, atomic: bool) -> None:
    store.publish(1, cuda.state)
    assert cuda.digested == 5, "of the dense ones with pieces of their own: 3 of large, 1 of half, 1 of bytes"
    check(store.load(1), cuda.state)
    check_get(store, cuda, 1, cuda.state, atomic=atomic)
    assert cuda.digested == (5 if atomic else 10), "an atomic get verifies copies on the host"


@pytest.mark.parametrize("fault", ["missing", "other checksums than xxhash", "other bytes"])
def test_the_host_computes_checksums_where_the_device_cannot_and_says_so_once(
    cuda: FakeCuda, no_kernel: None, store: WeightStore, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Before the kernel is used, it is tried with pieces of awkward lengths."""
    if fault != "missing":
        right, cuda.before_digest = cuda.digest, bool

        def wrong(addresses: Any, sizes: Any, device: torch.device, targets: Any = None) -> Any:
            if fault == "other bytes":
                return right(addresses, sizes, device)
            sums = right(addresses, sizes, device, targets)()
            return lambda: sums ^ (sizes == sizes.max())

        cuda.digest = wrong  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        publish_and_get(store, cuda)
        eventually(lambda: cuda_copies.digests.refused != "")
        store.publish(4, cuda.state | {"odd": cuda.state["odd"] + 1})
        report = store.inspect().report()
    said = [each.getMessage() for each in caplog.records if "checksums" in each.getMessage()]
    why = "No module named 'triton'" if fault == "missing" else fault
    assert len(said) == 1 and why in said[0] and "install triton" in said[0]
    assert [why in holder.slow for holder in report.holders] == [True]


def test_a_kernel_that_fails_leaves_its_checksums_to_the_host(cuda: FakeCuda, store: WeightStore) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    cuda.before_digest = fail
    store.publish(1, cuda.state)
    check_get(store, cuda, 1, cuda.state)
    assert cuda_copies.digests.refused == "RuntimeError: CUDA error: out of memory"


def test_bytes_that_change_on_the_way_to_a_device_are_not_taken(cuda: FakeCuda, store: WeightStore) -> None:
    store.publish(1, {"large": torch.randn(1_200_001)})
    into = cuda.put(torch.zeros(1_200_001))
    cuda.before_digest = lambda: into[5].add_(1)
    with pytest.raises(CorruptData, match="wrong bytes"):
        store.get(1, {"large": into})


def test_what_cannot_be_mapped_is_read(cuda: FakeCuda, store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InprocPlane, "map", Mock(side_effect=Unsupported("mapping", "read it")))
    publish_and_get(store, cuda)


def test_each_mapping_is_registered_once_and_until_it_goes(cuda: FakeCuda, store: WeightStore) -> None:
    for version in range(1, 9):
        store.publish(version, cuda.state)
        store.get(version, on_the_device(cuda, blank(cuda.state)))
    own, mapped = (sum(writable is kind for writable in cuda.registered.values()) for kind in (True, False))
    assert 1 <= own <= 5, "the pool has the memory of two versions, of the next one, and two ahead"
    assert 1 <= mapped <= own, "what is read is mapped once more, to be read alone"
    assert cuda.times <= 10
    store.close()
    gc.collect()
    assert cuda.registered == {}


def test_what_is_expected_is_registered_before_it_is_published(tmp_path: Path, cuda: FakeCuda) -> None:
    with WeightStore(f"memory://{tmp_path}", expect=4 << 20) as store:
        pool = store._replica_holder.pool
        eventually(lambda: pool._toucher is None)
        ahead = set(cuda.registered)
        assert len(ahead) == cuda.times == 2, "of the next two versions"
        store.publish(1, {"w": cuda.put(torch.ones(1 << 20))})
        assert len(ahead - {memory.data_ptr() for memory in pool._spare}) == 1, "one of them has the version"


def test_a_refusal_is_said_once(cuda: FakeCuda, store: WeightStore, caplog: pytest.LogCaptureFixture) -> None:
    cuda.refusal = "out of memory"
    with caplog.at_level(logging.WARNING):
        publish_and_get(store, cuda)
        report = store.inspect().report()
    said = [each.getMessage() for each in caplog.records if "cudaHostRegister" in each.getMessage()]
    assert len(said) == 1
    assert "'out of memory'" in said[0] and "ulimit -l" in said[0]
    assert [holder.slow for holder in report.holders] == ["out of memory"]
    shown = io.StringIO()
    Console(file=shown, width=200).print(holders_table(report))
    assert "copies from the GPU are slow: out of memory" in " ".join(shown.getvalue().split())


def test_bytes_are_digested_while_the_next_ones_are_copied(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies are queued before the first is waited for; the program's stream is waited for before the first."""
    monkeypatch.setattr(cuda_copies, "CHUNK_BYTES", 100)
    copies = [HostCopy(torch.ones(60), torch.zeros(60), 240 * (number + 1)) for number in range(3)]
    to_host(copies, lambda end: cuda.log.append(f"digest {end}"))
    arrivals = [line for end in (240, 480, 720) for line in ("arrived", f"digest {end}")]
    assert cuda.log == ["copies wait for the program", *["queued"] * 3, *arrivals, "all done"]
    assert all(torch.equal(copy.source, copy.target) for copy in copies)

    def fail(end: int) -> None:
        raise KeyboardInterrupt

    cuda.log.clear()
    with pytest.raises(KeyboardInterrupt):
        to_host(copies, fail)
    assert cuda.log[-1] == "all done", "copies are over before an error leaves the call"


def test_a_version_that_goes_while_it_is_copied_is_not_taken(
    tmp_path: Path, cuda: FakeCuda, no_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's checksums hold for what the device got as long as the region is open."""
    with WeightStore(f"memory://{tmp_path}", keep=1) as store:
        store.publish(1, cuda.state)
        newer = on_the_device(cuda, a_state())
        newer["small"] += 1

        def supersede(*arguments: Any) -> Any:
            monkeypatch.setattr(filling, "copy_and_digest", copy_and_digest)
            store.publish(2, newer)
            return copy_and_digest(*arguments)

        monkeypatch.setattr(filling, "copy_and_digest", supersede)
        check_get(store, cuda, 2, newer)


def test_rows_of_a_tensor_go_to_a_device(cuda: FakeCuda) -> None:
    """What a shard by columns takes: some bytes of each row."""
    whole = torch.randn(600, 700)
    part = pack([PartBlock("w", whole, (600, 700))], b"", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    for local, box in ((torch.zeros(600, 100), ((0, 600), (300, 400))), (torch.zeros(50, 700), ((9, 59), (0, 700)))):
        into = {"here": cuda.put(local)}
        wanted = BoxTarget("here", "w", box, ((0, local.shape[0]), (0, local.shape[1])))
        plan = plan_read((part.manifest.layout,), (wanted,), (("here", local_tensor(local)),))[0]
        targets = PartTargets(plan, [local], away=True)
        assert targets.only_away.all()
        targets.begin_copies(part.memory, 0, np.arange(len(plan.jobs))).wait()
        (rows, columns) = (slice(*each) for each in box)
        assert torch.equal(into["here"], whole[rows, columns])


# Copies on the device -------------------------------------------------------------------------------------------------


class FakeIpc(CudaIpc):
    """Memory of the host that passes for a device's; handles are numbers. `failure` is what CUDA says to `open`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.failure, self.opened = cuda, "", 0
        self.made: dict[bytes, Tensor] = {}
        self.unused: list[dict[str, object]] = []
        """The events of copies that could not be used."""

    def check(self) -> None:
        """All is there."""

    def gpu(self, device: torch.device) -> str:
        return "GPU-0"

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        return self.cuda.put(torch.full((nbytes,), 0xA5, dtype=torch.uint8))

    def address(self, memory: Tensor) -> DeviceAddress:
        handle = len(self.made).to_bytes(64)
        self.made[handle] = memory
        return DeviceAddress("GPU-0", handle, memory.nbytes)

    def open(self, address: DeviceAddress, device: torch.device) -> Tensor:
        if self.failure:
            raise BackendUnavailable("CUDA", self.failure)
        self.opened += 1
        return self.made[address.handle]


class NothingOwn(dict[bytes, Tensor]):
    """No memory is this process's own: all of it is opened, as in another process."""

    def __setitem__(self, handle: bytes, memory: Tensor) -> None:
        """Forgets it."""


@pytest.fixture
def ipc(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeIpc:
    fake = FakeIpc(cuda)
    monkeypatch.setattr(device_copies, "ipc", fake)
    monkeypatch.setattr(device_copies, "_own", NothingOwn())
    monkeypatch.setattr(cuda_copies.digests, "compile", lambda device: None)  # it was, for what passes for a device
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return fake


@pytest.fixture
def copying(tmp_path: Path, ipc: FakeIpc) -> Iterator[WeightStore]:
    """A store that keeps copies of parts on the device."""

    def observe(kind: str, fields: dict[str, object]) -> None:
        if kind == "device_copy_unused":
            ipc.unused.append(fields)

    with WeightStore(f"memory://{tmp_path}", device_copies=True, observe=observe) as opened:
        yield opened


def test_a_reader_copies_within_the_device(
    copying: WeightStore, cuda: FakeCuda, ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors and runs of small ones; what goes to the host comes from the host."""
    for version in range(1, 7):
        cuda.state["large"] += 1
        copying.publish(version, cuda.state)
        check_get(copying, cuda, version, cuda.state)
        check(copying.load(version), cuda.state)
    assert (copying.device_reads.read, copying.device_reads.unused, ipc.unused) == (6, 0, [])
    assert len(ipc.made) <= 3, "of the versions that are kept, and of the one that is published"
    assert ipc.opened == len(ipc.made), "each copy is opened once"
    alone = {name: cuda.state[name] for name in ("large", "half")}
    copying.publish(7, alone)
    monkeypatch.setattr(filling, "copy_and_digest", None)
    check_get(copying, cuda, 7, alone)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("refused", "invalid device context"),
        ("damaged", "pieces have wrong bytes"),
        ("dead", "is gone"),
        ("superseded", "closed"),
    ],
)
def test_what_the_device_does_not_have_is_read_from_the_host(
    copying: WeightStore, cuda: FakeCuda, ipc: FakeIpc, fault: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying.publish(1, cuda.state)
    expected, version = cuda.state, 1
    if fault == "refused":
        ipc.failure = why
    elif fault == "damaged":
        for memory in ipc.made.values():
            memory[3_000_000] ^= 1
    elif fault == "dead":
        monkeypatch.setattr(device_copies, "is_gone", lambda peer: True)
    else:
        expected, version = on_the_device(cuda, a_state()), 3
        expected["half"] += 1

        def supersede() -> None:
            cuda.before_digest = bool
            for number in (2, 3):
                copying.publish(number, expected)

        cuda.before_digest = supersede
    check_get(copying, cuda, version, expected)
    assert copying.device_reads.unused == len(ipc.unused) == 1
    assert why in str(ipc.unused[0]["why"]) and {"version", "part", "holder"} <= ipc.unused[0].keys()


def test_copies_on_a_device_go_with_their_versions(copying: WeightStore, cuda: FakeCuda, ipc: FakeIpc) -> None:
    made = weakref.WeakSet[Tensor]()
    allocate = ipc.allocate
    ipc.allocate = lambda nbytes, device: made.add(found := allocate(nbytes, device)) or found  # type: ignore[method-assign,func-returns-value]
    for version in range(1, 5):
        copying.publish(version, {"w": cuda.put(torch.randn(1 << 20))})
    copying.close()
    ipc.made.clear()
    cuda._spans.clear()
    gc.collect()
    assert not made


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(Unsupported, match="no CUDA device"):
        WeightStore(f"memory://{tmp_path}", device_copies=True)
