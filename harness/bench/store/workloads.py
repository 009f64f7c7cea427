"""The workloads of the bench.

Each names the state that is handed over, the number of workers, and what a turn of a contestant is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.ft.console.units import counted
from holdfast.harness.bench.store.data import equal_shapes, model_shapes
from holdfast.harness.bench.store.drivers import HOLDFAST, MEMCPY, PEERS, SAFETENSORS, TORCHSTORE
from holdfast.harness.bench.store.goals import Goal
from holdfast.harness.bench.store.teams import Team, Worker
from holdfast.harness.bench.store.wire import (
    Answer,
    Blank,
    Change,
    Check,
    Checked,
    Digests,
    Get,
    How,
    Order,
    Publish,
    TensorShape,
    Took,
)

EVERYONE = (HOLDFAST, *PEERS)
FAN_OUT = 8
FSDP_RANKS, TP_RANKS = 4, 2
_CHANGES = {"all changed": 1.0, "1% changed": 0.01}
_LOADS: Mapping[str, How] = {"new tensors": "load", "mapped": "map"}
SERVED_BYTES = 40_000_000
"""The bytes of 10 million parameters of float32."""
FOLLOWING_SECONDS = 0.03
"""Seconds after which a reader that was told to follow waits for a version."""


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """The seconds of each figure of a turn, how many tensors came out wrong, and private bytes by figure."""

    seconds: Mapping[str, float]
    wrong: int
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    """One workload: its state by `--size`, its workers, and what a turn with a version's number is."""

    name: str
    what: str
    figures: Sequence[str]
    shapes: Callable[[int], tuple[TensorShape, ...]]
    turn: Callable[[Team, int], BenchTurn]
    contestants: Sequence[str] = EVERYONE
    publishers: int = 1
    readers: int = 1
    holders: int = 0
    replicas: int = 1
    sharded: bool = False
    apart: bool = False
    goals: Sequence[Goal] = field(default=())


def ask(workers: Sequence[Worker], order: Order) -> list[Answer]:
    """Give an order to several workers at once; their answers in order."""
    for worker in workers:
        worker.send(order)
    return [worker.answer() for worker in workers]


def change(team: Team, version: int, share: float = 0.0) -> Digests:
    """Make the source of all publishers that of a version: a share of its elements differ."""
    answer = ask(team.publishers, Change(version, share))[0]
    assert isinstance(answer, Digests)
    return answer


def publish(team: Team, version: int) -> Took:
    """Publish a version: from the first publisher's start to the last one's end."""
    return _span(ask(team.publishers, Publish(version)))


def get(readers: Sequence[Worker], version: int, how: How = "get") -> Took:
    """Have all readers get a version at once: from the first one's start to the last one's end."""
    ask(readers, Blank())
    return _span(ask(readers, Get(version, how)))


def _span(answers: Sequence[Answer]) -> Took:
    took = [answer for answer in answers if isinstance(answer, Took)]
    return Took(min(each.began for each in took), max(each.ended for each in took), max(each.memory for each in took))


def _seconds(took: Took) -> float:
    return took.ended - took.began


def wrong(readers: Sequence[Worker], digests: Digests, sharded: bool = False) -> int:
    """How many tensors that the readers got are not those of the version."""
    for reader in readers:
        reader.send(Check(digests.shards[reader.rank] if sharded else digests.whole))
    answers = [reader.answer() for reader in readers]
    return sum(each.wrong for each in answers if isinstance(each, Checked))


# Turns ----------------------------------------------------------------------------------------------------------------


def exchange(team: Team, version: int) -> BenchTurn:
    """Publish a version, and have one reader get it."""
    digests, readers = change(team, version), team.readers[:1]
    published = publish(team, version)
    got = get(readers, version)
    return BenchTurn({"publish": _seconds(published), "get": _seconds(got)}, wrong(readers, digests))


def _load(team: Team, version: int) -> BenchTurn:
    digests, readers = change(team, version), team.readers[:1]
    publish(team, version)
    seconds, memory, bad = {}, {}, 0
    for figure, how in _LOADS.items():
        if how == "load" or team.contestant == HOLDFAST:
            took = get(readers, version, how)
            seconds[figure], memory[figure] = _seconds(took), took.memory
            bad += wrong(readers, digests)
    return BenchTurn(seconds, bad, memory)


def _verification(team: Team, version: int) -> BenchTurn:
    turn, readers = exchange(team, version), team.readers[:1]
    copied = _span(ask(readers, Get(version, "copy")))  # maps the version
    copied = _span(ask(readers, Get(version, "copy")))
    return BenchTurn({"get": turn.seconds["get"], "copies alone": _seconds(copied)}, turn.wrong)


def _reshard(team: Team, version: int) -> BenchTurn:
    digests = change(team, version)
    published = publish(team, version)
    got = get(team.readers, version)
    bad = wrong(team.readers, digests, sharded=True)
    one = team.readers[:1]
    whole = get(one, version, "whole")
    seconds = {"publish": _seconds(published), "resharded": _seconds(got), "whole, one reader": _seconds(whole)}
    return BenchTurn(seconds, bad + wrong(one, digests))


def _fan_out(team: Team, version: int) -> BenchTurn:
    digests = change(team, version)
    publish(team, version)
    one = get(team.readers[:1], version)
    bad = wrong(team.readers[:1], digests)
    everyone = get(team.readers, version)
    bad += wrong(team.readers, digests)
    seconds = {"one reader": _seconds(one), f"{FAN_OUT} readers": _seconds(everyone)}
    if team.contestant == HOLDFAST:
        seconds[f"{FAN_OUT} readers that map"] = _seconds(get(team.readers, version, "map"))
        bad += wrong(team.readers, digests)
    return BenchTurn(seconds, bad)


def _served(team: Team, version: int) -> BenchTurn:
    digests, reader = change(team, version), team.readers[0]
    ask([reader], Blank())
    reader.send(Get(version, "follow"))
    time.sleep(FOLLOWING_SECONDS)
    published = publish(team, version)
    served = reader.answer()
    assert isinstance(served, Took)
    return BenchTurn({"served": served.ended - published.began}, wrong([reader], digests))


def _delta(team: Team, version: int) -> BenchTurn:
    """Publish a version that differs everywhere, then one that differs a little: the reader has the one before."""
    seconds, bad, readers = {}, 0, team.readers[:1]
    if version == 1:
        ask(readers, Blank())
    for number, (figure, share) in enumerate(_CHANGES.items(), 2 * version):
        digests = change(team, number, share)
        published = publish(team, number)
        got = _span(ask(readers, Get(number)))
        seconds[figure] = _seconds(published) + _seconds(got)
        bad += wrong(readers, digests)
    return BenchTurn(seconds, bad)


def _killed(team: Team, version: int) -> BenchTurn:
    """Kill a holder in the middle of a get: in turn the publisher and the other one."""
    digests, reader = change(team, version), team.readers[0]
    publish(team, version)
    undisturbed = _seconds(get([reader], version))
    bad = wrong([reader], digests)
    victim = (team.publishers if version % 2 else team.holders)[0]
    ask([reader], Blank())
    reader.send(Get(version))
    time.sleep(undisturbed * random.Random(version).uniform(0.2, 0.7))
    victim.kill()
    killed = time.monotonic()
    took = reader.answer()
    assert isinstance(took, Took)
    seconds = {"undisturbed": undisturbed}
    if took.began < killed < took.ended:
        seconds["a holder killed"] = _seconds(took)
    bad += wrong([reader], digests)
    team.replace(victim)
    return BenchTurn(seconds, bad)


def _model(nbytes: int) -> tuple[TensorShape, ...]:
    return model_shapes(nbytes, "bfloat16")


def _half_model(nbytes: int) -> tuple[TensorShape, ...]:
    return _model(nbytes // 2)


def _quarter_model(nbytes: int) -> tuple[TensorShape, ...]:
    """Each of the readers of a fan-out has a target of its own."""
    return _model(nbytes // 4)


def _served_model(nbytes: int) -> tuple[TensorShape, ...]:
    return model_shapes(min(nbytes, SERVED_BYTES), "float32")


def _flat(nbytes: int) -> tuple[TensorShape, ...]:
    return equal_shapes(8, nbytes // 8)


def _small(nbytes: int) -> tuple[TensorShape, ...]:
    return equal_shapes(300, 16 << 10)


AT_MEMORY_SPEED = (
    Goal("get", "speed", 0.9, MEMCPY),
    Goal("get", "speed", 1.0, TORCHSTORE),
    Goal("publish", "speed", 0.9, MEMCPY),
    Goal("publish", "first", 1.3),
)

WORKLOADS = (
    BenchWorkload(
        "model",
        "a model in bfloat16, from another process of the host",
        ("publish", "get"),
        _model,
        exchange,
        goals=AT_MEMORY_SPEED,
    ),
    BenchWorkload(
        "random",
        "8 random tensors of float32",
        ("publish", "get"),
        _flat,
        exchange,
        goals=AT_MEMORY_SPEED,
    ),
    BenchWorkload(
        "replicas",
        "the model, kept by two processes before the publish returns; by one in the others",
        ("publish", "get"),
        _model,
        exchange,
        contestants=(HOLDFAST, MEMCPY, TORCHSTORE),
        holders=1,
        replicas=2,
        goals=(Goal("publish", "speed", 0.45, MEMCPY), Goal("publish", "first", 1.3)),
    ),
    BenchWorkload(
        "small",
        "300 tensors of 16 KiB",
        ("publish", "get"),
        _small,
        exchange,
        goals=(
            Goal("publish", "seconds", 0.005),
            Goal("get", "seconds", 0.0025),
            Goal("publish", "first", 1.3),
            Goal("get", "first", 1.3),
        ),
    ),
    BenchWorkload(
        "load",
        "the model as new tensors; mapped: where the holder has them",
        tuple(_LOADS),
        _model,
        _load,
        contestants=(HOLDFAST, TORCHSTORE, MEMCPY, SAFETENSORS),
        goals=(Goal("mapped", "seconds", 0.005), Goal("mapped", "memory", 1 << 20)),
    ),
    BenchWorkload(
        "reshard",
        f"half of the size, from {counted(FSDP_RANKS, 'rank')} of FSDP to {TP_RANKS} of tensor parallelism",
        ("publish", "resharded", "whole, one reader"),
        _half_model,
        _reshard,
        contestants=(HOLDFAST, TORCHSTORE),
        publishers=FSDP_RANKS,
        readers=TP_RANKS,
        sharded=True,
        goals=(
            Goal("resharded", "times", 1 / 0.7, "whole, one reader"),
            Goal("resharded", "speed", 2.0, TORCHSTORE),
        ),
    ),
    BenchWorkload(
        "verification",
        "a get, beside its copies without checksums",
        ("get", "copies alone"),
        _model,
        _verification,
        contestants=(HOLDFAST,),
        goals=(Goal("get", "times", 1 / 0.9, "copies alone"),),
    ),
    BenchWorkload(
        "delta",
        "publish and get of the model by a reader on another host, over TCP, that has the version before",
        tuple(_CHANGES),
        _model,
        _delta,
        contestants=(HOLDFAST,),
        apart=True,
        goals=(Goal("1% changed", "times", 0.2, "all changed"),),
    ),
    BenchWorkload(
        "killed",
        "a holder ended by SIGKILL in the middle of a get; the other one goes on",
        ("undisturbed", "a holder killed"),
        _model,
        _killed,
        contestants=(HOLDFAST,),
        holders=1,
        replicas=2,
        goals=(Goal("a holder killed", "more", 0.05, "undisturbed"),),
    ),
    BenchWorkload(
        "fan-out",
        f"a quarter of the size: the newest version to {FAN_OUT} readers at once",
        ("one reader", f"{FAN_OUT} readers", f"{FAN_OUT} readers that map"),
        _quarter_model,
        _fan_out,
        contestants=(HOLDFAST, TORCHSTORE, MEMCPY),
        readers=FAN_OUT,
        goals=(
            Goal(f"{FAN_OUT} readers", "times", 3.0, "one reader"),
            Goal(f"{FAN_OUT} readers", "speed", 0.9, MEMCPY),
            Goal(f"{FAN_OUT} readers that map", "times", 3.0, "one reader"),
        ),
    ),
    BenchWorkload(
        "served",
        "from the start of a publish to the tensors of a reader that follows: 10 million parameters in float32",
        ("served",),
        _served_model,
        _served,
        contestants=(HOLDFAST,),
        goals=(Goal("served", "seconds", 0.05),),
    ),
)
