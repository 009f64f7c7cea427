"""Tensors on CUDA devices in the store. Needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.store import WeightStore
from holdfast.store.data.cuda_copies import digests, registrations
from support.waiting import PROGRAM_SECONDS, next_line
from support.weights.state_dicts import same, value_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def mixed_state() -> dict[str, torch.Tensor]:
    """64 tensors of all usual dtypes: large and small ones, some not in order, some of the host."""
    random = torch.Generator().manual_seed(7)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn)
    state = {}
    for number in range(64):
        size = (3, 129, 70_001, 700_003)[number % 4]
        each = torch.randint(0, 256, (size * 8,), generator=random).to(torch.uint8)
        tensor = each.view(dtypes[number % len(dtypes)])[:size] if number % len(dtypes) != 4 else each[:size]
        if tensor.is_floating_point():
            tensor = torch.randn(size, generator=random).to(tensor.dtype)
        state[f"{number}"] = tensor if number % 16 == 5 else tensor.cuda()
    state["60"] = torch.randn(200, 700, generator=random).cuda().t()
    state["61"] = torch.randn(200, 700, generator=random).cuda()[:, ::2]
    state["62"] = torch.randn(500, dtype=torch.complex64, generator=random).cuda().conj()
    state["63"] = torch.empty(0, 4, device="cuda")
    return state


def wrong(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in expected if not same(found[name].cpu(), expected[name].cpu())]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("atomic", [False, True])
def test_tensors_of_all_kinds_come_and_go(store: WeightStore, atomic: bool, compiled: bool) -> None:
    state = mixed_state()
    if compiled:
        pytest.importorskip("triton", reason="the kernel that computes checksums on a device")
        digests.compile(torch.device("cuda", 0))  # which tries it with pieces of awkward lengths
    for version in (1, 2, 3):
        state["0"].add_(1)
        store.publish(version, state)
        into = {name: torch.zeros_like(each) for name, each in state.items()}
        store.get(version, into, atomic=atomic)
        assert wrong(into, state) == []
        assert wrong(store.load(version), state) == []
    assert registrations.refused == "" and (digests.refused == "" or not compiled)


PUBLISHER = """
import sys
import torch
from holdfast.store import WeightStore
url, device_copies, replicas = sys.argv[1:]
with WeightStore(url, replicas=int(replicas), device_copies=device_copies == "True") as store:
    for version in range(1, 100):
        w = torch.full((32 << 20,), float(version), device="cuda")
        store.publish(version, {"w": w, "small": w[:9], "of the host": torch.full((5,), float(version))})
        print(version, flush=True)
        sys.stdin.readline()
"""


class Publisher:
    """Another process, which publishes a version of 128 MiB each time it is asked to. It is no fork: CUDA is in use."""

    def __init__(self, url: str, device_copies: bool, replicas: int) -> None:
        program = [sys.executable, "-c", PUBLISHER, url, str(device_copies), str(replicas)]
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def version(self) -> int:
        """The version that is published now."""
        return int(next_line(self.process.stdout))

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PROGRAM_SECONDS)


@pytest.fixture
def publisher(url: str, request: pytest.FixtureRequest) -> Iterator[Publisher]:
    started = Publisher(url, *request.param)
    yield started
    started.kill()


def targets() -> dict[str, torch.Tensor]:
    return {
        "w": torch.zeros(32 << 20, device="cuda"),
        "small": torch.zeros(9, device="cuda"),
        "of the host": torch.zeros(5),
    }


@pytest.mark.parametrize("publisher", [(False, 1), (True, 1)], indirect=True, ids=["the host", "the device"])
def test_another_process_gets_them_into_its_own(url: str, publisher: Publisher, request: pytest.FixtureRequest) -> None:
    device_copies = "the device" in request.node.name
    into = targets()
    with WeightStore(url, hold=False, device_copies=device_copies) as store:
        for number in range(5):
            version = publisher.version()
            assert store.get("latest", into, atomic=number == 4) == version
            assert value_of(into) == version
            publisher.go_on()
        assert store.device_reads.unused == 0
        assert store.device_reads.read == (4 if device_copies else 0), "an atomic get goes by way of the host"
    assert registrations.refused == ""


@pytest.mark.parametrize("publisher", [(True, 2)], indirect=True)
def test_a_publisher_killed_while_its_copies_are_open(url: str, publisher: Publisher) -> None:
    """The test's process holds the part, too: it is read from there, not from the publisher's GPU."""
    into = targets()
    with WeightStore(url, replicas=2, device_copies=True) as store:
        version = publisher.version()
        assert store.get(version, into) == version
        assert on_the_device(store) == (1, 0)
        publisher.kill()
        for each in into.values():
            each.zero_()
        assert store.get(version, into, timeout=20) == version
        assert value_of(into) == version
        assert store.device_reads.read == 1


def on_the_device(store: WeightStore) -> tuple[int, int]:
    return store.device_reads.read, store.device_reads.unused


def test_a_version_that_is_pinned_stays_while_later_ones_come_and_go(tmp_path: Path) -> None:
    with WeightStore(f"memory://{tmp_path}", device_copies=True, keep=1) as store:
        store.publish(1, {"w": torch.ones(4 << 20, device="cuda")})
        lease = store.pin(1)
        for version in range(2, 6):
            store.publish(version, {"w": torch.full((4 << 20,), float(version), device="cuda")})
        into = {"w": torch.zeros(4 << 20, device="cuda")}
        for version in (1, 5):
            assert store.get(version, into) == version
            assert into["w"].unique().tolist() == [version]
        assert on_the_device(store) == (2, 0)
        lease.release()


def test_what_is_queued_on_the_stream_before_a_publish_is_published(store: WeightStore) -> None:
    weight = torch.zeros(1 << 22, device="cuda")
    for version in range(1, 6):
        for _ in range(50):
            weight.add_(1)
        store.publish(version, {"w": weight})
        weight.add_(0)
    assert store.load(5)["w"].unique().tolist() == [250.0]


def test_a_follower_swaps_staged_versions_into_tensors_of_a_device(store: WeightStore) -> None:
    into = {"w": torch.zeros(1 << 20, device="cuda"), "small": torch.zeros(3, device="cuda")}
    for version in range(1, 4):
        store.publish(version, {name: torch.full_like(each, version) for name, each in into.items()})
        with store.follow(into) as follower:
            assert follower.catch_up() == version
        assert into["w"].unique().tolist() == into["small"].unique().tolist() == [version]
