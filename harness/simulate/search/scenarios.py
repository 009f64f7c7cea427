"""Named scenarios for jobs of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from holdfast.harness.simulate.core.faults import (
    BlockRegister,
    Fault,
    KillHost,
    KillProcess,
    KillRack,
    KillShare,
    PartitionHosts,
)
from holdfast.harness.simulate.core.schedule import JobLayout, NetworkModel, Schedule

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
