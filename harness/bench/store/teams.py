"""The running workers of one contestant, and how they are started."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.comms.transport.liveness import HOST
from holdfast.harness.bench.store.data import TensorShape
from holdfast.harness.bench.store.drivers import (
    HOLDFAST,
    MEMCPY,
    PINNED,
    SAFETENSORS,
    TORCHSTORE,
    WorkerPlan,
    torchstore_home,
)
from holdfast.harness.bench.store.worker import be_worker
from holdfast.harness.measure.workers import Fork, Place, StartedWorker, Worker, WorkerGroup, WorkerProgram, call

SEED = 1
PRELOAD = ("holdfast.store", "holdfast.harness.bench.store.worker", "torch.distributed.checkpoint")
"""What workers import: once, in the process that they are forked from."""

Role = tuple[str, int]


def missing(contestant: str, source: Path | None) -> str | None:
    """Why `contestant` cannot run here and what to do about it; None if it can."""
    if contestant == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        return "safetensors is not installed; pip install safetensors"
    if contestant == TORCHSTORE:
        if source is None:
            return "no checkout of torchstore's main branch was given: --torchstore-source, or HOLDFAST_TORCHSTORE"
        if not (source / "torchstore" / "__init__.py").is_file():
            return f"there is no torchstore in {source}"
        if importlib.util.find_spec("monarch") is None and not any(torchstore_home().glob("lib/*/*/monarch")):
            return f"Monarch is not in {torchstore_home()}; make store-peers"
    return None


@dataclass(frozen=True, slots=True)
class TeamPlan:
    """The workers of each contestant: `publishers`, `readers`, `holders` besides them, and threads of torch in each.

    They hand over versions of `tensors`; `sharded`: each has shards of them. With `apart`, readers take themselves to
    be on another host, and all go over TCP.
    """

    tensors: tuple[TensorShape, ...] = ()
    threads: int = 1
    publishers: int = 1
    readers: int = 1
    holders: int = 0
    replicas: int = 1
    sharded: bool = False
    apart: bool = False
    torchstore_source: Path | None = None
    device: str = "cpu"
    device_copies: bool = False

    def roles(self, contestant: str) -> Sequence[Role]:
        """The role and number of each worker of a contestant."""
        counts = {"publisher": self.publishers, "holder": self.holders, "reader": self.readers}
        if contestant in (MEMCPY, PINNED):
            counts = {"both": self.readers}
        elif contestant != HOLDFAST:
            counts["holder"] = 0
        return [(role, rank) for role, count in counts.items() for rank in range(count)]


class Team(WorkerGroup):
    """All workers of a contestant."""

    def __init__(self, contestant: str, plan: TeamPlan) -> None:
        self.plan = plan
        roles = plan.roles(contestant)
        super().__init__(contestant, len(roles), partial(_start, contestant, plan, roles))

    @property
    def publishers(self) -> Sequence[Worker]:
        """The workers that change and publish their source."""
        return [each for each in self.workers if each.role in ("publisher", "both")]

    @property
    def readers(self) -> Sequence[Worker]:
        return [each for each in self.workers if each.role in ("reader", "both")]

    @property
    def holders(self) -> Sequence[Worker]:
        return [each for each in self.workers if each.role == "holder"]

    def prepare(self, workers: Sequence[Worker] | None = None) -> None:
        """Tell workers (all of them) what the state is, and whether publishers and readers have shards of it."""
        sharded = (self.plan.publishers, self.plan.readers) if self.plan.sharded else None
        call(self.workers if workers is None else workers, "prepare", self.plan.tensors, SEED, sharded, into=type(None))

    def start_again(self, worker: Worker) -> None:
        """Start a worker in the place of one that was killed."""
        start = partial(_start, self.contestant, self.plan, [(worker.role, worker.rank)])
        self.prepare([self.replace(worker, start)])


def _start(contestant: str, plan: TeamPlan, roles: Sequence[Role], place: Place) -> Sequence[StartedWorker]:
    if contestant == TORCHSTORE:
        module = [sys.executable, "-m", "holdfast.harness.bench.store.torchstore_actors"]
        counts = [str(plan.publishers), str(plan.readers)]
        return [
            WorkerProgram(
                place, [*module, *counts, str(place.folder), str(place.shared)], _torchstore_environment(plan)
            )
        ]
    plane, environ = ("ucx", {"UCX_TLS": "tcp,self"}) if plan.apart else ("auto", {})
    return [
        Fork(
            place,
            f"{contestant} {role}",
            partial(
                be_worker,
                contestant,
                WorkerPlan(
                    role, rank, place.folder, place.shared, plan.replicas, plane, plan.device, plan.device_copies
                ),
                place.address,
            ),
            preload=PRELOAD,
            threads=plan.threads,
            environ=environ | ({HOST: "readers"} if plan.apart and role == "reader" else {}),
        )
        for role, rank in roles
    ]


def _torchstore_environment(plan: TeamPlan) -> dict[str, str]:
    """What the program of the actors needs: the packages of torchstore after ours, threads, and quiet logs."""
    homes = [str(plan.torchstore_source), *(str(path) for path in torchstore_home().glob("lib/*/site-packages"))]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (*homes, os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": str(plan.threads),
        "TORCHSTORE_LOG_LEVEL": "ERROR",
        "MONARCH_FILE_LOG": "error",
        "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "910737418240",
    }
