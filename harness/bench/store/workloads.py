"""The workloads of the store's bench, and the teams of workers that contestants send to them.

Each workload names the state that is handed over, the number of workers, and what a turn of a contestant is.

"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from holdfast.comms.errors import Unsupported
from holdfast.comms.transport.liveness import HOST
from holdfast.ft.console.units import counted
from holdfast.harness.bench.store.data import TensorShape, equal_shapes, model_shapes
from holdfast.harness.bench.store.drivers import (
    HOLDFAST,
    MEMCPY,
    PEERS,
    PINNED,
    SAFETENSORS,
    TORCHSTORE,
    WorkerPlan,
    torchstore_home,
)
from holdfast.harness.bench.store.worker import MATRIX, PRODUCTS, Digests, How, Took, be_worker
from holdfast.harness.measure.rounds import TimedTurn, Workload
from holdfast.harness.measure.workers import Place, StartedWorker, Worker, WorkerGroup, WorkerProgram, call, fork

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
        fork(
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


# Workloads ------------------------------------------------------------------------------------------------------------


EVERYONE = (HOLDFAST, *PEERS)
FAN_OUT = 8
FSDP_RANKS, TP_RANKS = 4, 2
_CHANGES = {"all changed": 1.0, "1% changed": 0.01}
_BESIDE = {"alone": (False, False), "beside a pinned copy": (True, True), "beside a publish": (True, False)}
"""What products are multiplied beside: whether there is anything, and whether it is a mere copy."""
_LOADS: Mapping[str, How] = {"new tensors": "load", "mapped": "map"}
SERVED_BYTES = 40_000_000
"""The bytes of 10 million parameters of float32."""
FOLLOWING_SECONDS = 0.03
"""Seconds after which a reader that was told to follow waits for a version."""


@dataclass(frozen=True)
class StoreBenchWorkload(Workload[Team]):
    """One workload: its state by `--size`, its workers, and what a turn with a version's number is."""

    name: str
    what: str
    figures: Sequence[str]
    shapes: Callable[[int], tuple[TensorShape, ...]]
    body: Callable[[Team, int], TimedTurn]
    contestants: Sequence[str] = EVERYONE
    workers: TeamPlan = field(default_factory=TeamPlan)

    def team(self, size: int, threads: int, torchstore_source: Path | None) -> TeamPlan:
        """The workers of each contestant."""
        return replace(self.workers, tensors=self.shapes(size), threads=threads, torchstore_source=torchstore_source)

    def set_up(self, contestant: Team) -> None:
        contestant.prepare()

    def turn(self, contestant: Team, number: int) -> TimedTurn:
        return self.body(contestant, number + 1)


def change(team: Team, version: int, share: float = 0.0) -> Digests:
    """Make the source of all publishers that of a version: a share of its elements differ."""
    return call(team.publishers, "change", version, share, into=Digests)[0]


def publish(team: Team, version: int) -> Took:
    """Publish a version: from the first publisher's start to the last one's end."""
    return _span(call(team.publishers, "publish", version, into=Took))


def blank(readers: Sequence[Worker]) -> None:
    """Overwrite the targets of readers."""
    call(readers, "blank", into=type(None))


def get(readers: Sequence[Worker], version: int, how: How = "get") -> Took:
    """Have all readers get a version at once: from the first one's start to the last one's end."""
    blank(readers)
    return again(readers, version, how)


def again(readers: Sequence[Worker], version: int, how: How = "get") -> Took:
    """The same into what the readers have."""
    return _span(call(readers, "get", version, how, into=Took))


def _span(took: Sequence[Took]) -> Took:
    return Took(min(each.began for each in took), max(each.ended for each in took), max(each.memory for each in took))


def wrong(readers: Sequence[Worker], digests: Digests, sharded: bool = False) -> int:
    """How many tensors that the readers got are not those of the version."""
    for reader in readers:
        reader.send("check", digests.shards[reader.rank] if sharded else digests.whole)
    return sum(reader.answer(int) for reader in readers)


def _turn(seconds: Mapping[str, float], wrong: int, memory: Mapping[str, int] | None = None) -> TimedTurn:
    return TimedTurn({figure: [each] for figure, each in seconds.items()}, wrong, memory or {})


# Turns ----------------------------------------------------------------------------------------------------------------


def exchange(team: Team, version: int) -> TimedTurn:
    """Publish a version, and have one reader get it."""
    digests, readers = change(team, version), team.readers[:1]
    published = publish(team, version)
    got = get(readers, version)
    return _turn({"publish": published.seconds, "get": got.seconds}, wrong(readers, digests))


def _load(team: Team, version: int) -> TimedTurn:
    digests, readers = change(team, version), team.readers[:1]
    publish(team, version)
    seconds, memory, bad = {}, {}, 0
    for figure, how in _LOADS.items():
        if how == "load" or team.contestant == HOLDFAST:
            took = get(readers, version, how)
            seconds[figure], memory[figure] = took.seconds, took.memory
            bad += wrong(readers, digests)
    return _turn(seconds, bad, memory)


def _verification(team: Team, version: int) -> TimedTurn:
    turn, readers = exchange(team, version), team.readers[:1]
    again(readers, version, "copy")  # maps the version
    copied = again(readers, version, "copy")
    return TimedTurn({"get": turn.seconds["get"], "copies alone": [copied.seconds]}, turn.wrong)


def _reshard(team: Team, version: int) -> TimedTurn:
    digests = change(team, version)
    published = publish(team, version)
    got = get(team.readers, version)
    bad = wrong(team.readers, digests, sharded=True)
    one = team.readers[:1]
    whole = get(one, version, "whole")
    seconds = {"publish": published.seconds, "resharded": got.seconds, "whole, one reader": whole.seconds}
    return _turn(seconds, bad + wrong(one, digests))


def _fan_out(team: Team, version: int) -> TimedTurn:
    digests = change(team, version)
    publish(team, version)
    one = get(team.readers[:1], version)
    bad = wrong(team.readers[:1], digests)
    everyone = get(team.readers, version)
    bad += wrong(team.readers, digests)
    seconds = {"one reader": one.seconds, f"{FAN_OUT} readers": everyone.seconds}
    if team.contestant == HOLDFAST:
        seconds[f"{FAN_OUT} readers that map"] = get(team.readers, version, "map").seconds
        bad += wrong(team.readers, digests)
    return _turn(seconds, bad)


def _served(team: Team, version: int) -> TimedTurn:
    digests, reader = change(team, version), team.readers[0]
    blank([reader])
    reader.send("get", version, "follow")
    time.sleep(FOLLOWING_SECONDS)
    published = publish(team, version)
    served = reader.answer(Took)
    return _turn({"served": served.ended - published.began}, wrong([reader], digests))


def _delta(team: Team, version: int) -> TimedTurn:
    """Publish a version that differs everywhere, then one that differs a little: the reader has the one before."""
    seconds, bad, readers = {}, 0, team.readers[:1]
    if version == 1:
        blank(readers)
    for number, (figure, share) in enumerate(_CHANGES.items(), 2 * version):
        digests = change(team, number, share)
        published = publish(team, number)
        got = again(readers, number)
        seconds[figure] = published.seconds + got.seconds
        bad += wrong(readers, digests)
    return _turn(seconds, bad)


def _killed(team: Team, version: int) -> TimedTurn:
    """Kill a holder in the middle of a get: in turn the publisher and the other one."""
    digests, reader = change(team, version), team.readers[0]
    publish(team, version)
    undisturbed = get([reader], version).seconds
    bad = wrong([reader], digests)
    victim = (team.publishers if version % 2 else team.holders)[0]
    blank([reader])
    reader.send("get", version)
    time.sleep(undisturbed * random.Random(version).uniform(0.2, 0.7))
    victim.kill()
    killed = time.monotonic()
    took = reader.answer(Took)
    seconds = {"undisturbed": undisturbed}
    if took.began < killed < took.ended:
        seconds["a holder killed"] = took.seconds
    bad += wrong([reader], digests)
    team.start_again(victim)
    return _turn(seconds, bad)


def _multiply(team: Team, version: int) -> TimedTurn:
    """Multiply matrices on the GPU alone, beside a copy, and while a version is published, which a reader gets.

    Each of these goes first in turn.
    """
    digests, publishers, readers = change(team, version), team.publishers[:1], team.readers[:1]
    ways = list(_BESIDE.items())
    first, seconds = version % len(ways), {}
    for figure, (publishes, pinned) in ways[first:] + ways[:first]:
        seconds[figure] = call(publishers, "multiply", version if publishes else None, pinned, into=Took)[0].seconds
    get(readers, version)
    return _turn(seconds, wrong(readers, digests))


def _model(nbytes: int) -> tuple[TensorShape, ...]:
    return model_shapes(nbytes, "bfloat16")


def _many(nbytes: int) -> tuple[TensorShape, ...]:
    return equal_shapes(64, nbytes // 64, "bfloat16")


WORKLOADS = (
    StoreBenchWorkload(
        "model",
        "a model in bfloat16, from another process of the host",
        ("publish", "get"),
        _model,
        exchange,
    ),
    StoreBenchWorkload(
        "random",
        "8 random tensors of float32",
        ("publish", "get"),
        lambda nbytes: equal_shapes(8, nbytes // 8),
        exchange,
    ),
    StoreBenchWorkload(
        "replicas",
        "the model, kept by two processes before the publish returns; by one in the others",
        ("publish", "get"),
        _model,
        exchange,
        contestants=(HOLDFAST, MEMCPY, TORCHSTORE),
        workers=TeamPlan(holders=1, replicas=2),
    ),
    StoreBenchWorkload(
        "small",
        "300 tensors of 16 KiB",
        ("publish", "get"),
        lambda _: equal_shapes(300, 16 << 10),
        exchange,
    ),
    StoreBenchWorkload(
        "load",
        "the model as new tensors; mapped: where the holder has them",
        tuple(_LOADS),
        _model,
        _load,
        contestants=(HOLDFAST, TORCHSTORE, MEMCPY, SAFETENSORS),
    ),
    StoreBenchWorkload(
        "reshard",
        f"half of the size, from {counted(FSDP_RANKS, 'rank')} of FSDP to {TP_RANKS} of tensor parallelism",
        ("publish", "resharded", "whole, one reader"),
        lambda nbytes: _model(nbytes // 2),
        _reshard,
        contestants=(HOLDFAST, TORCHSTORE),
        workers=TeamPlan(publishers=FSDP_RANKS, readers=TP_RANKS, sharded=True),
    ),
    StoreBenchWorkload(
        "verification",
        "a get, beside its copies without checksums",
        ("get", "copies alone"),
        _model,
        _verification,
        contestants=(HOLDFAST,),
    ),
    StoreBenchWorkload(
        "delta",
        "publish and get of the model by a reader on another host, over TCP, that has the version before",
        tuple(_CHANGES),
        _model,
        _delta,
        contestants=(HOLDFAST,),
        workers=TeamPlan(apart=True),
    ),
    StoreBenchWorkload(
        "killed",
        "a holder ended by SIGKILL in the middle of a get; the other one goes on",
        ("undisturbed", "a holder killed"),
        _model,
        _killed,
        contestants=(HOLDFAST,),
        workers=TeamPlan(holders=1, replicas=2),
    ),
    StoreBenchWorkload(
        "fan-out",
        f"a quarter of the size: the newest version to {FAN_OUT} readers at once",
        ("one reader", f"{FAN_OUT} readers", f"{FAN_OUT} readers that map"),
        lambda nbytes: _model(nbytes // 4),
        _fan_out,
        contestants=(HOLDFAST, TORCHSTORE, MEMCPY),
        workers=TeamPlan(readers=FAN_OUT),
    ),
    StoreBenchWorkload(
        "served",
        "from the start of a publish to the tensors of a reader that follows: 10 million parameters in float32",
        ("served",),
        lambda nbytes: model_shapes(min(nbytes, SERVED_BYTES), "float32"),
        _served,
        contestants=(HOLDFAST,),
    ),
)

DEVICE_WORKLOADS = (
    StoreBenchWorkload(
        "gpu",
        "64 tensors of bfloat16 on the GPU, from another process of the host",
        ("publish", "get"),
        _many,
        exchange,
        contestants=(HOLDFAST, PINNED),
        workers=TeamPlan(device="cuda"),
    ),
    StoreBenchWorkload(
        "gpu-copies",
        "the same, with a copy on the GPU that the reader copies from (CUDA IPC)",
        ("publish", "get"),
        _many,
        exchange,
        contestants=(HOLDFAST,),
        workers=TeamPlan(device="cuda", device_copies=True),
    ),
    StoreBenchWorkload(
        "products",
        f"{PRODUCTS} products of matrices of {MATRIX} by {MATRIX} on the GPU that publishes",
        tuple(_BESIDE),
        _many,
        _multiply,
        contestants=(HOLDFAST,),
        workers=TeamPlan(device="cuda"),
    ),
)
"""The workloads of `--device cuda`."""


def known_on(device: str) -> tuple[list[str], tuple[str, ...]]:
    """The names of the workloads for tensors on a device, and of the other contestants."""
    if device == "cpu":
        return [each.name for each in WORKLOADS], PEERS
    return [each.name for each in DEVICE_WORKLOADS], (PINNED,)


def check_device(device: str) -> None:
    """Raise ValueError for a device that the bench does not know, `Unsupported` for one that is not here."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {device}; known: cpu, cuda")
    if device == "cuda" and torch.cuda.device_count() == 0:  # asks NVML: workers are forked from processes without CUDA
        install = "install torch with CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        look = "look at nvidia-smi and CUDA_VISIBLE_DEVICES: this torch has CUDA, and sees no GPU"
        raise Unsupported("measuring a GPU on this machine", install if torch.version.cuda is None else look)
