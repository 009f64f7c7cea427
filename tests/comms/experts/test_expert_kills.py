"""A training of experts outlives a rank; docs/experiments/experts.py kills at random."""

from __future__ import annotations

import importlib.util

from holdfast.harness import LocalCluster
from support.source_tree import ROOT
from support.waiting import PATIENCE


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
