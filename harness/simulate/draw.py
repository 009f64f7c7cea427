"""Makes schedules: draws options and faults from seeds (swarm testing), and has named scenarios for any size.

Each seed leaves most options out, so that those that are on meet each other often (Groce et al., "Swarm Testing", ISSTA
2012). At most half of the hosts are broken: with fewer left no survivor can tell a loss from a cut.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from holdfast.ft.faultpoints import POINTS
from holdfast.harness.simulate.core.faults import (
    AtPoint,
    BlockRegister,
    BreakDetector,
    CutPath,
    DelayConnections,
    DelayPath,
    DelayRegister,
    DriftClock,
    Fault,
    JumpClock,
    KillHost,
    KillProcess,
    KillRack,
    KillShare,
    LoseProposals,
    PartitionHosts,
    PauseProcess,
    RefuseSignals,
    SlowProcess,
    StartProcess,
)
from holdfast.harness.simulate.core.schedule import JobLayout, NetworkModel, Schedule

LAST = 2.5
"""The latest begin of a fault in seconds, or while the job runs."""
FLAPPING = 0.2
"""The share of seeds with three hosts or more that have flapping links and no other faults."""
AROUND_NODES = 0.4
"""The share of seeds with steps in which what nodes stand on fails too: clocks, connections, detectors, register."""
DEGRADED = 0.4
"""The share of seeds with steps whose jobs go on without the dead, for a step or longer."""
HEALING = (CutPath, PartitionHosts, DelayPath, PauseProcess, SlowProcess, AtPoint)
"""The faults after which a member that was silent may be heard again."""
POINTS_REACHED = tuple(point for point in POINTS if point != "sync.before_chunk")


MakeFault = Callable[[float], Fault]


def draw(seed: int, ranks: int | None = None, hosts: int | None = None) -> Schedule:
    """The schedule of a seed, which draws ranks and hosts too if `ranks` is not given. A large job has no steps."""
    rng = random.Random(seed * 2 + 1)
    layout, network = _layout(rng), _network(rng)
    if ranks is not None:
        layout = _resized(layout, ranks, hosts or max(1, ranks // RANKS_A_HOST))
    elif hosts is not None:
        raise ValueError("--hosts needs --ranks: without it, each seed draws ranks and hosts")
    if layout.hosts >= 3 and layout.steps and rng.random() < FLAPPING:
        faults = _flapping(rng, layout.hosts)
        layout = replace(layout, form=False, compute=0.06, steps=int(faults[-1].at / 0.06) + 20)
        return Schedule(seed=seed, layout=layout, network=network, faults=tuple(faults))
    faults = _faults(rng, layout)
    if layout.steps and rng.random() < AROUND_NODES:
        heals = network.loss or any(isinstance(fault, HEALING) for fault in faults)
        faults += _faults_around_nodes(rng, layout, unanswered=not heals)
    if layout.steps and rng.random() < DEGRADED:
        layout = replace(layout, on_death=rng.choice(("finish_step", "go_on")), degraded_steps=rng.choice((1, 3, 100)))
        faults += _deaths_in_steps(rng, layout, faults)
    unanswered = any(isinstance(fault, DelayRegister | LoseProposals) for fault in faults)
    bound = Schedule().bound + (layout.timeouts().rebuild if unanswered else 0.0)
    if layout.on_death == "go_on":  # messages carry the votes on each step of a degraded epoch
        bound += layout.steps * (network.reorder_delay if network.reorder else 0.0) + layout.steps * network.loss
    return Schedule(seed=seed, layout=layout, network=network, faults=tuple(faults), bound=bound)


def _layout(rng: random.Random) -> JobLayout:
    hosts = rng.choice((1, 2, 3, 3, 4, 4, 5))
    ranks = hosts * rng.choice((1, 2, 2)) if hosts > 1 else rng.randint(2, 5)
    return JobLayout(
        ranks=ranks,
        hosts=hosts,
        racks=hosts,
        spares=rng.choice((0, 0, 1, 2)),
        min_size=1 if rng.random() < 0.7 else max(1, ranks - 2),
        steps=rng.choice((10, 20, 40)),
        compute=rng.choice((0.02, 0.06)),
        form=rng.random() < 0.15,
        join=3.0,
        mesh=1 if rng.random() < 0.3 else 64,
    )


def _resized(layout: JobLayout, ranks: int, hosts: int) -> JobLayout:
    large = ranks > MOST_WITH_STEPS
    return replace(
        layout,
        ranks=ranks,
        hosts=hosts,
        racks=racks_for(hosts) if large else hosts,
        min_size=1,
        steps=0 if large else layout.steps,
        form=layout.form and not large,
        join=60.0 if large else layout.join,
    )


def _network(rng: random.Random) -> NetworkModel:
    def sometimes(value: float) -> float:
        return value if rng.random() < 0.35 else 0.0

    return NetworkModel(
        latency=rng.choice((0.0001, 0.0005, 0.003)),
        spread=rng.choice((0.2, 0.5, 1.0)),
        loss=sometimes(0.02),
        shared=0.2,
        burst=rng.choice((0.01, 0.03)),
        duplicate=sometimes(0.1),
        reorder=sometimes(0.15),
        reorder_delay=rng.choice((0.05, 0.5)),
        register=rng.choice((0.0005, 0.002, 0.02)),
    )


def _faults(rng: random.Random, layout: JobLayout) -> list[Fault]:
    makers = _faults_of_a_job(rng, layout) if layout.steps else _losses(rng, layout)
    kinds = rng.sample(makers, rng.randint(1, min(4, len(makers))))
    budget = max(1, (layout.hosts - 1) // 2)
    last = min(LAST, 1.1 * layout.steps * layout.compute) if layout.steps else LAST
    broken: set[int] = set()
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 8)):
        at = round(rng.random() * last, 3)
        fault = rng.choice(kinds)(at)
        risk = _at_risk(fault, layout, len(faults))
        if layout.hosts > 1 and len(broken | risk) > budget:
            continue
        broken |= risk
        faults.append(fault)
        if rng.random() < 0.4 and isinstance(fault, KillProcess | AtPoint | PauseProcess) and layout.hosts == 1:
            faults.append(rng.choice(kinds)(round(at + rng.choice((0.0, 0.0005, 0.003)), 4)))
    if not layout.steps and rng.random() < 0.3:
        faults.append(BlockRegister(at=faults[0].at, seconds=rng.choice((0.2, 1.0)), writes=rng.random() < 0.5))
    return faults


def _faults_of_a_job(rng: random.Random, layout: JobLayout) -> list[MakeFault]:
    makers: list[MakeFault] = [
        lambda at: KillProcess(at=at, process=rng.randrange(layout.ranks + layout.spares)),
        lambda at: PauseProcess(at=at, process=rng.randrange(layout.ranks), seconds=rng.choice((0.05, 0.3, 0.8, 1.5))),
        lambda at: AtPoint(
            at=at, point=rng.choice(POINTS_REACHED), nth=rng.randint(1, 12), seconds=rng.choice((0, 0, 0.9))
        ),
        lambda at: StartProcess(at=at, host=rng.randrange(layout.hosts)),
        lambda at: BlockRegister(at=at, seconds=rng.choice((0.01, 0.2, 1.0)), writes=rng.random() < 0.5),
        lambda at: SlowProcess(at=at, process=rng.randrange(layout.ranks), delay=rng.choice((0.01, 0.1)), seconds=1.0),
        lambda at: DriftClock(at=at, process=rng.randrange(layout.ranks), share=rng.choice((-0.05, 0.05))),
    ]
    if layout.hosts > 1:
        makers += [
            lambda at: KillHost(at=at, host=rng.randrange(layout.hosts)),
            lambda at: KillRack(at=at, rack=rng.randrange(layout.racks)),
            lambda at: PartitionHosts(
                at=at,
                hosts=(rng.randrange(layout.hosts),),
                seconds=rng.choice((0.3, 1.0, 2.0)),
                register=rng.random() < 0.5,
            ),
            lambda at: CutPath(at=at, **_pair(rng, layout), seconds=rng.choice((0.3, 0.6, 0.8, 1.2))),
            lambda at: DelayPath(
                at=at, **_pair(rng, layout), delay=rng.choice((0.05, 0.3, 0.7)), seconds=rng.choice((0.2, 0.6))
            ),
        ]
    return makers


def _deaths_in_steps(rng: random.Random, layout: JobLayout, before: list[Fault]) -> list[Fault]:
    """Deaths once the first communicator stands, on one host if others are broken already."""
    broken = {host for number, fault in enumerate(before) for host in _at_risk(fault, layout, number)}
    late = any(isinstance(fault, DelayConnections) for fault in before)
    if layout.hosts > 1 and (late or len(broken) >= (layout.hosts - 1) // 2):
        return []
    victim = rng.randrange(layout.hosts)
    ranks = [rank for rank in range(layout.ranks) if layout.host_of(rank) == victim]
    times = [
        round(rng.uniform(0.1, max(0.2, 0.9 * layout.steps * layout.compute)), 4) for _ in range(rng.randint(1, 2))
    ]
    return [KillProcess(at=at, process=rng.choice(ranks)) for at in times]


def _faults_around_nodes(rng: random.Random, layout: JobLayout, unanswered: bool) -> list[Fault]:
    """Faults of clocks, detectors and connections, and with `unanswered` one that makes the register's answers late.

    A view that is agreed late may leave out a member that is heard again by then: that is no fault of the protocol.
    """
    makers: list[MakeFault] = [
        lambda at: JumpClock(at=at, host=rng.randrange(layout.hosts), forward=rng.choice((0.3, 1.0, 5.0))),
        lambda at: BreakDetector(
            at=at, process=rng.randrange(layout.ranks), detector=rng.choice(("pidfd", "heartbeat", "observers"))
        ),
        lambda at: RefuseSignals(at=at, host=rng.randrange(layout.hosts), seconds=rng.choice((0.3, 1.5))),
        lambda at: DelayConnections(
            at=at, host=rng.randrange(layout.hosts), delay=rng.choice((0.1, 1.0)), seconds=rng.choice((1.0, 3.0))
        ),
    ]
    late: list[MakeFault] = [
        lambda at: DelayRegister(at=at, delay=rng.choice((0.05, 0.5, 12.0)), seconds=rng.choice((0.3, 1.0))),
        lambda at: LoseProposals(at=at, seconds=rng.choice((0.3, 1.0)), writes=rng.random() < 0.5),
    ]
    last = min(LAST, 1.1 * layout.steps * layout.compute)
    faults = [rng.choice(makers)(round(rng.random() * last, 3)) for _ in range(rng.randint(1, 3))]
    if unanswered and rng.random() < 0.5:
        faults.append(rng.choice(late)(round(rng.random() * last, 3)))
    return faults


def _losses(rng: random.Random, layout: JobLayout) -> list[MakeFault]:
    """Faults that take members from a large job, in which a cut between two hosts changes nothing."""
    return [
        lambda at: KillProcess(at=at, process=rng.randrange(layout.ranks)),
        lambda at: PauseProcess(at=at, process=rng.randrange(layout.ranks), seconds=rng.choice((0.3, 0.8, 1.5))),
        lambda at: KillHost(at=at, host=rng.randrange(layout.hosts)),
        lambda at: KillRack(at=at, rack=rng.randrange(layout.racks)),
        lambda at: PartitionHosts(at=at, hosts=(rng.randrange(layout.hosts),), seconds=rng.choice((0.3, 1.0, 2.0))),
    ]


def _flapping(rng: random.Random, hosts: int) -> list[Fault]:
    """One host falls silent for others in turn, never for most of them at a time, and always recovers."""
    victim, *others = rng.sample(range(hosts), hosts)
    gap, seconds = rng.choice((1.0, 1.7, 2.3)), rng.choice((0.6, 0.75, 0.9))
    return [
        CutPath(at=round(0.3 + gap * turn, 3), source=victim, target=others[turn % len(others)], seconds=seconds)
        for turn in range(rng.randint(2, 6))
    ]


def _pair(rng: random.Random, layout: JobLayout) -> dict[str, int]:
    source, target = rng.sample(range(layout.hosts), 2)
    return {"source": source, "target": target}


def _at_risk(fault: Fault, layout: JobLayout, number: int) -> set[int]:
    """The hosts that the fault may silence. A fault at a point may be anywhere: it counts as a host of its own."""
    if isinstance(fault, AtPoint):
        return {-1 - number}
    return set() if isinstance(fault, CutPath | DelayPath) else {*fault.silenced(layout)}


# Named scenarios ------------------------------------------------------------------------------------------------------


AT = 1.0
"""When the faults of scenarios begin, in seconds."""
HOSTS_A_RACK = 40
RANKS_A_HOST = 8
MOST_WITH_STEPS = 256
"""With more ranks only membership is simulated, and heartbeats that change nothing are left out."""

Make = Callable[[JobLayout], tuple[Fault, ...]]

SCENARIOS: Mapping[str, tuple[str, Make]] = MappingProxyType(
    {
        "quiet": ("nothing happens", lambda layout: ()),
        "crash": (
            "one process ends; others of its host see it",
            lambda layout: (KillProcess(at=AT, process=layout.ranks // 2),),
        ),
        "host-loss": (
            "all processes of one host end at once: only silence tells of it",
            lambda layout: (KillHost(at=AT, host=layout.hosts // 2),),
        ),
        "rack-loss": (
            "all processes of one rack end at once",
            lambda layout: (KillRack(at=AT, rack=layout.racks // 2),),
        ),
        "tenth-loss": ("a tenth of all hosts end at once", lambda layout: (KillShare(at=AT, share=0.1),)),
        "first-host-loss": (
            "the host of the first ranks ends, who propose and are told of evidence",
            lambda layout: (KillHost(at=AT, host=0),),
        ),
        "host-loss-register-away": (
            "a host ends while the register is away for two seconds",
            lambda layout: (KillHost(at=AT, host=layout.hosts // 2), BlockRegister(at=AT, seconds=2.0)),
        ),
        "cut-off": (
            "one host is cut off from all others for three seconds",
            lambda layout: (PartitionHosts(at=AT, hosts=(layout.hosts // 2,), seconds=3.0),),
        ),
    }
)
"""The scenarios by name: a description, and the function that makes their faults."""


def racks_for(hosts: int) -> int:
    """How many racks so many hosts stand in."""
    return max(1, min(hosts, -(-hosts // HOSTS_A_RACK) if hosts > HOSTS_A_RACK else hosts // 2))


def scenario(
    name: str,
    ranks: int,
    hosts: int,
    seed: int,
    *,
    steps: int = 0,
    spares: int = 0,
    network: NetworkModel | None = None,
) -> Schedule:
    """The schedule of a scenario. Raises ValueError for an unknown name."""
    if name not in SCENARIOS:
        raise ValueError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)} and swarm")
    layout = JobLayout(
        ranks=ranks,
        hosts=hosts,
        racks=racks_for(hosts),
        spares=spares,
        steps=steps,
        suspect=0.4,
        join=60.0,
    )
    return Schedule(seed=seed, layout=layout, network=network or NetworkModel(), faults=SCENARIOS[name][1](layout))
