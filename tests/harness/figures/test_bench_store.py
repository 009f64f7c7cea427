"""`holdfast bench store` measures every workload and contestant, and finds what came out wrong."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from holdfast.harness.bench.store import data, drivers, workloads
from holdfast.harness.bench.store.run import StoreBench, StorePlan, run
from holdfast.harness.bench.store.worker import Digests, StoreWorker, Took
from holdfast.harness.bench.store.workloads import missing
from support.programs.forked_programs import said, said_as_json

SHAPES = data.equal_shapes(3, 4096)


def a_plan(workloads: tuple[str, ...], peers: tuple[str, ...] = (), size: int = 1 << 20) -> StorePlan:
    return StorePlan(workloads, peers, size, 1, 1, 1, None, "holdfast bench store")


def test_all_contestants_hand_over_the_same_small_tensors() -> None:
    """The command prints it as JSON. Torchstore is left out for want of a checkout, with what to do."""
    peers = (drivers.MEMCPY, drivers.SAFETENSORS, drivers.DCP)
    options = ["--workloads", "small", "--peers", ",".join((*peers, drivers.TORCHSTORE)), "--size", "1M"]
    options += ["--starts", "1", "--rounds", "1", "--threads", "1"]
    told = said_as_json("bench", "store", *options, HOLDFAST_TORCHSTORE="")
    bench = msgspec.convert(told, StoreBench)
    assert (bench.failures, [*bench.skipped], bench.wrong) == ((), [drivers.TORCHSTORE], 0)
    assert "--torchstore-source" in bench.skipped[drivers.TORCHSTORE]
    found = {(row.workload, row.figure, row.contestant) for row in bench.rows}
    figures = [("small", figure) for figure in ("publish", "get")]
    assert found == {(*figure, name) for figure in figures for name in (drivers.HOLDFAST, *peers)}
    assert {(each.workload, each.figure, each.peer) for each in bench.ratios} == {
        (*figure, name) for figure in figures for name in peers
    }
    assert all(row.timing.p50 > 0 and len(row.turns) == 1 for row in bench.rows)
    assert all(len(row.early) == 3 and all(row.early) for row in bench.rows)
    assert {row.tensors for row in bench.rows} == {300}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("workloads", "peers", "size", "figures"),
    [
        (("killed",), (), 8 << 20, {"undisturbed"}),
        (("verification", "served"), (), 1 << 20, {"get", "copies alone", "served"}),
        (
            ("load", "reshard"),
            (drivers.MEMCPY,),
            1 << 20,
            {"new tensors", "mapped", "publish", "resharded", "whole, one reader"},
        ),
        (("delta",), (), 16 << 20, {"all changed", "1% changed"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_every_workload_is_measured(
    workloads: tuple[str, ...], peers: tuple[str, ...], size: int, figures: set[str]
) -> None:
    bench = run(a_plan(workloads, peers, size))
    assert (bench.failures, bench.wrong) == ((), 0)
    ours = {row.figure: row for row in bench.rows if row.contestant == drivers.HOLDFAST}
    assert figures <= ours.keys() if workloads == ("killed",) else figures == ours.keys()
    assert {row.figure for row in bench.rows if row.contestant == drivers.MEMCPY} == (
        {"new tensors"} if peers else set()
    )
    assert "mapped" not in ours or ours["mapped"].memory is not None


@pytest.mark.thorough
@pytest.mark.skipif(
    "HOLDFAST_TORCHSTORE" not in os.environ, reason="set HOLDFAST_TORCHSTORE to a checkout of torchstore"
)
def test_torchstore_takes_part_from_a_checkout() -> None:
    plan = a_plan(("small",), (drivers.TORCHSTORE,))
    bench = run(replace(plan, torchstore_source=Path(os.environ["HOLDFAST_TORCHSTORE"])))
    assert (bench.failures, bench.wrong) == ((), 0)
    assert {row.contestant for row in bench.rows} == {drivers.HOLDFAST, drivers.TORCHSTORE}


def test_a_folder_without_a_checkout_of_torchstore_is_named(tmp_path: Path) -> None:
    assert str(tmp_path) in str(missing(drivers.TORCHSTORE, tmp_path))


# What counts as wrong -------------------------------------------------------------------------------------------------


class PartialDriver(drivers.StoreDriver):
    """Gets all tensors but the last."""

    detail = "partial"

    def __init__(self) -> None:
        self.kept: data.State = {}

    async def publish(self, version: int, state: data.State) -> None:
        self.kept = {name: each.clone() for name, each in state.items()}

    async def get(self, version: int, into: data.State) -> None:
        for name in list(into)[:-1]:
            into[name].copy_(self.kept[name])


def test_a_tensor_that_was_not_got_is_wrong(tmp_path: Path) -> None:
    driver = PartialDriver()
    worker = StoreWorker(drivers.WorkerPlan("both", 0, tmp_path, tmp_path, 1, "auto"), driver)
    worker.prepare(SHAPES, 1)
    digests = worker.change(1)
    asyncio.run(driver.publish(1, data.source(SHAPES, 1)))
    worker.blank()
    asyncio.run(worker.get(1))
    assert worker.check(digests.whole) == len(SHAPES), "the first ones lack the change of the version"


def test_every_version_differs_from_the_one_before_in_every_tensor() -> None:
    state = data.source(SHAPES, 1)
    before = data.digests(state)
    for version in range(1, 5):
        data.change(state, version)
        after = data.digests(state)
        assert all(old != new for old, new in zip(before, after, strict=True))
        before = after


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_about_the_share_of_the_elements_changes(share: float) -> None:
    before = data.source(data.equal_shapes(1, 1 << 20, "bfloat16"), 1)
    after = {name: each.clone() for name, each in before.items()}
    data.change(after, 1, share)
    (one,), (other,) = before.values(), after.values()
    assert 0.9 * share < float((one != other).double().mean()) <= share + 1e-4


@pytest.mark.parametrize("nbytes", [1 << 20, 40_000_000, 512 << 20])
def test_a_model_takes_nearly_all_bytes_that_it_may(nbytes: int) -> None:
    shapes = data.model_shapes(nbytes, "bfloat16")
    assert 0.99 * nbytes < data.bytes_of(shapes) <= nbytes
    assert "model.layers.1.self_attn.q_proj.weight" in {each.name for each in shapes}


def test_a_size_that_no_model_has_is_refused() -> None:
    with pytest.raises(ValueError, match="256K"):
        data.model_shapes(1024, "bfloat16")


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="a GPU is here")
def test_the_command_says_what_a_gpu_needs() -> None:
    done = said("bench", "store", "--device", "cuda")
    assert done.exit_code == 2
    assert "pip install torch --index-url" in done.stderr or "nvidia-smi" in done.stderr


def test_products_alone_and_beside_copies_go_first_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that none of the figures is always that of a GPU that comes from rest, at a higher clock."""
    asked: list[tuple[int | None, bool]] = []

    def call(workers: object, method: str, version: int | None, pinned: bool, *, into: type) -> list[Took]:
        asked.append((version, pinned))
        return [Took(0.0, 1.0, 0)]

    monkeypatch.setattr(workloads, "call", call)
    monkeypatch.setattr(workloads, "change", lambda team, version: Digests((), ()))
    monkeypatch.setattr(workloads, "get", lambda readers, version: None)
    monkeypatch.setattr(workloads, "wrong", lambda readers, digests: 0)
    (products,) = (each for each in workloads.DEVICE_WORKLOADS if each.name == "products")
    team: Any = SimpleNamespace(publishers=[None], readers=[None])
    turns = [products.body(team, version) for version in (1, 2, 3)]
    assert all(set(turn.seconds) == set(products.figures) for turn in turns)
    assert asked[::3] == [(1, True), (2, False), (None, False)]
    assert sorted(asked[3:6], key=str) == sorted([(None, False), (2, True), (2, False)], key=str)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU")
def test_tensors_of_a_gpu_are_measured_beside_a_pinned_copy() -> None:
    bench = run(a_plan(("gpu", "gpu-copies", "products"), (drivers.PINNED,), 64 << 20))
    assert (bench.failures, bench.wrong) == ((), 0)
    found = {(row.figure, row.contestant) for row in bench.rows}
    assert {(figure, name) for figure in ("publish", "get") for name in (drivers.HOLDFAST, drivers.PINNED)} <= found
    assert {(each, drivers.HOLDFAST) for each in ("alone", "beside a pinned copy", "beside a publish")} <= found
