"""Tensors on CUDA devices in the store. Needs a GPU."""

from __future__ import annotations

import itertools
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import xxhash

from holdfast.store import WeightStore
from holdfast.store.data.device_copy import registrations
from holdfast.store.delta import native_kernels
from holdfast.store.delta.kernels import kernels_for
from holdfast.store.delta.records import BLOCK, Delta, ElementPiece, PackedDelta
from holdfast.store.publish.publication import diff
from holdfast.store.read.delta import apply

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_tensors_of_a_device_are_published_and_filled(tmp_path: Path) -> None:
    state = {"large": torch.randn(1 << 20, device="cuda"), "small": torch.arange(7, device="cuda")}
    state["transposed"] = torch.randn(30, 40, device="cuda").t()
    with WeightStore(f"memory://{tmp_path}") as store:
        store.publish(1, state)
        into = {name: torch.zeros_like(each) for name, each in state.items()}
        store.get(1, into)
        assert all(torch.equal(into[name], each) for name, each in state.items())
        loaded = store.load(1)
        assert all(torch.equal(loaded[name], each.cpu()) for name, each in state.items())


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
    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        flat = (each.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8) for each in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)

    return [name for name in expected if not same(found[name], expected[name])]


@pytest.mark.parametrize("atomic", [False, True])
def test_tensors_of_all_kinds_come_and_go(tmp_path: Path, atomic: bool) -> None:
    state = mixed_state()
    with WeightStore(f"memory://{tmp_path}") as store:
        for version in (1, 2, 3):
            state["0"].add_(1)
            store.publish(version, state)
            into = {name: torch.zeros_like(each) for name, each in state.items()}
            store.get(version, into, atomic=atomic)
            assert wrong(into, state) == []
            assert wrong(store.load(version), state) == []
    assert registrations.refused == ""


def _publish_for_ever(url: str, pipe: Connection) -> None:
    with WeightStore(url, replicas=1) as store:
        for version in itertools.count(1):
            store.publish(version, {"w": torch.full((32 << 20,), float(version), device="cuda")})
            pipe.send(version)
            pipe.recv()


def test_another_process_gets_them_into_its_own(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    url = f"sqlite:///{tmp_path}/register"
    publisher = context.Process(target=_publish_for_ever, args=(url, theirs), daemon=True)
    publisher.start()
    into = {"w": torch.zeros(32 << 20, device="cuda")}
    try:
        with WeightStore(url, hold=False) as store:
            for _ in range(5):
                assert ours.poll(60)
                version = ours.recv()
                assert store.get("latest", into) == version
                assert into["w"].unique().tolist() == [version]
                ours.send("go on")
            assert registrations.refused == ""
    finally:
        publisher.kill()
        publisher.join()


def test_what_is_queued_on_the_stream_before_a_publish_is_published(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 22, device="cuda")
    with WeightStore(f"memory://{tmp_path}") as store:
        for version in range(1, 6):
            for _ in range(50):
                weight.add_(1)
            store.publish(version, {"w": weight})
            weight.add_(0)
        assert store.load(5)["w"].unique().tolist() == [250.0]


def test_a_follower_swaps_staged_versions_into_tensors_of_a_device(tmp_path: Path) -> None:
    into = {"w": torch.zeros(1 << 20, device="cuda"), "small": torch.zeros(3, device="cuda")}
    with WeightStore(f"memory://{tmp_path}") as store:
        for version in range(1, 4):
            store.publish(version, {name: torch.full_like(each, version) for name, each in into.items()})
            with store.follow(into) as follower:
                assert follower.catch_up() == version
            assert into["w"].unique().tolist() == into["small"].unique().tolist() == [version]


def pieces_of_all_sizes() -> list[ElementPiece]:
    pieces, offset = [], 0
    for itemsize in (1, 2, 4, 8):
        for elements in (1, 1000, 1024, BLOCK + 1025, 5 * BLOCK + 3):
            pieces.append(ElementPiece(offset, elements * itemsize, itemsize))
            offset += -(-elements * itemsize // 64) * 64
    return pieces


@pytest.mark.parametrize("share", [0.0, 0.003, 0.05, 1.0])
def test_deltas_of_a_device_have_the_bits_of_those_of_the_host(share: float) -> None:
    """Made, patched and verified on the device, by Triton's kernels."""
    pytest.importorskip("triton", reason="the kernels for deltas on a device")
    pieces = pieces_of_all_sizes()
    size = pieces[-1].offset + pieces[-1].nbytes
    random = torch.Generator().manual_seed(3)
    old = torch.randint(0, 256, (size,), generator=random).to(torch.uint8)
    new = old.clone()
    new[torch.randint(0, size, (int(size * share),), generator=random)] ^= 0x41
    new[pieces[3].offset + BLOCK] ^= 1
    there, changed = old.cuda(), new.cuda()

    def encoded(packed: PackedDelta) -> torch.Tensor:
        data = torch.zeros(packed.nbytes, dtype=torch.uint8)
        packed.write(data, b"o" * 16, b"n" * 16)
        return data

    on_host = encoded(native_kernels.diff([p.of(old) for p in pieces], [p.of(new) for p in pieces], pieces))
    assert torch.equal(encoded(diff(there, changed, pieces)), on_host)
    delta = Delta.decode(on_host, b"o" * 16, b"n" * 16, pieces)
    sums = [xxhash.xxh3_64_intdigest(piece.of(new).numpy().data) for piece in pieces]
    whole = {at for at, record in enumerate(delta.records) if record is None}
    for into in (torch.zeros_like(there), there):
        assert set(apply(delta, [p.of(there) for p in pieces], [p.of(into) for p in pieces], sums)) == whole
        for at, piece in enumerate(pieces):
            assert at in whole or torch.equal(piece.of(into).cpu(), piece.of(new))


def test_checksums_of_a_device_are_those_of_the_host() -> None:
    pytest.importorskip("triton", reason="the kernels that compute checksums on a device")
    kernels = kernels_for(torch.device("cuda", 0))
    data = torch.randint(0, 256, (80_000,), generator=torch.Generator().manual_seed(5)).to(torch.uint8)
    cuts = [data[:size] for size in (1, 240, 241, 1024, 1025, 1087, 1088, 2048, 2049, 70001)] + [data[3:4000]]
    wanted = [xxhash.xxh3_64_intdigest(each.numpy().data) for each in cuts]
    assert kernels.checksums([each.cuda() for each in cuts]) == wanted  # type: ignore[attr-defined]
