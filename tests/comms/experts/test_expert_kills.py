"""Ranks are killed at random, amid steps and anywhere; those that live have the same, right results."""

from __future__ import annotations

import importlib.util

import pytest

from holdfast.harness import LocalCluster
from holdfast.harness.bench.experts import ExpertLoad, kill_again_and_again, run
from support.source_tree import ROOT
from support.waiting import PATIENCE


@pytest.mark.parametrize(
    ("backend", "kills"),
    [
        ("shm", 6),
        pytest.param("shm", 60, marks=pytest.mark.thorough),
        pytest.param("gloo", 10, marks=pytest.mark.thorough),
        pytest.param("ucx", 10, marks=pytest.mark.thorough),
        pytest.param("mpi", 10, marks=pytest.mark.thorough),
    ],
)
def test_kills_at_random(backend: str, kills: int) -> None:
    assert kill_again_and_again(backend, 3, kills, seed=kills).kills == kills


def test_the_bench_compares_a_switch_with_a_collective() -> None:
    bench = run(["switch:inproc", "all_to_all:inproc"], 2, ExpertLoad(8, 4, 8), rounds=1, steps=2, kills=0)
    assert [exchange.contestant for exchange in bench.exchanges] == ["switch:inproc", "all_to_all:inproc"]
    assert all(exchange.ms > 0 for exchange in bench.exchanges)


def test_the_example_trains_through_a_kill_and_loses_no_step() -> None:
    path = str(ROOT / "examples" / "train_moe.py")

    def train(session: object) -> list[tuple[int, float, int]]:
        spec = importlib.util.spec_from_file_location("train_moe", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        history: list[tuple[int, float, int]] = module.train(session, 40)
        return history

    with LocalCluster(3, "shm", session={"on_death": "go_on"}) as cluster:
        histories = cluster.start(train).results(timeout=4 * PATIENCE)
    assert len(histories) == 2
    for history in histories:
        steps, losses, alive = zip(*history, strict=True)
        assert steps == tuple(range(40)), "each is committed once, in order"
        assert alive == (3,) * 20 + (2,) * 20
        assert losses[-1] < losses[15] < losses[0]
