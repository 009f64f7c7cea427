"""The examples that train a small Llama while a rank is killed: they reach the weights of an undisturbed run."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from holdfast.ft import Timeouts
from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness import LocalCluster
from support.source_tree import ROOT

pytestmark = pytest.mark.thorough

EXAMPLES = ROOT / "examples"
QUICK = Timeouts(heartbeat=0.2, suspect=2.0, operation=40.0, rebuild=20.0, join=20.0)
STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    pytest.importorskip("transformers", reason="the examples need transformers: pip install 'holdfast[rl]'")
    zygote().preload(
        "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama"
    )


def run(example: str, size: int, spares: int = 0, **asked: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """The fingerprint of the weights on each rank, and the events of a job that runs the example's `train`."""
    path = str(EXAMPLES / f"{example}.py")

    def train(session: Any) -> str:
        sys.path.insert(0, str(EXAMPLES))  # as a script has its folder
        spec = importlib.util.spec_from_file_location(example, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        fingerprint: str = module.train(session, STEPS, **asked)
        return fingerprint

    with LocalCluster(size, "shm", spares=spares, session={"timeouts": QUICK, "shards": 6}) as ranks:
        job = ranks.start(train)
        return job.results(90.0), job.events()


@pytest.mark.parametrize("example", ["train_ddp", "train_fsdp2"])
def test_a_kill_does_not_change_the_weights(example: str) -> None:
    """Two ranks without failures, and three ranks, one of them killed in step 2, agree in every bit."""
    undisturbed, _ = run(example, 2)
    survivors, events = run(example, 3, kill_rank=1, kill_step=2)
    assert len(set(undisturbed)) == 1 and undisturbed[0]
    assert survivors == undisturbed
    restored = [event["source"] for event in events if event["kind"] == "restored" and event["epoch"] == 4]
    assert restored == (["neighbour"] * 2 if example == "train_fsdp2" else [])
    copied = sorted(event["seconds"] for event in events if event["kind"] == "copied")
    if copied:
        print(f"\n{example}: keeping a copy took {copied[len(copied) // 2] * 1e3:.1f} ms a step (median)")
