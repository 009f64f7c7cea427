"""A simulation as data: the job, the network, the faults. Read from TOML or JSON, written as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.comms.errors import UNDECODABLE
from holdfast.ft.membership.view import OnDeath, Timeouts
from holdfast.harness.simulate.core.faults import Fault, KillShare, PartitionHosts


class JobLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The job.

    `ranks` processes are spread evenly over `hosts`, these over `racks`; `spares` further processes are on the last
    hosts. `steps` of `compute` seconds are to be committed (0 steps: membership alone). With `form` the processes first
    form the job, one by one; without, they begin in a running view. The rest is `ft.Timeouts`, and the number of
    members up to which each watches all others.

    `on_death` as for `ft.Session`. Unless it is "rebuild", a step's results are exchanged as by `comms.experts.Switch`:
    the living leave out a process that has ended (on one host, one that is silent for `masked` seconds too). With
    "go_on", members ask for a rebuild after `degraded_steps`.
    """

    ranks: int = 8
    hosts: int = 4
    racks: int = 2
    spares: int = 1
    min_size: int = 1
    steps: int = 30
    compute: float = 0.05
    form: bool = False
    heartbeat: float = 0.1
    suspect: float = 0.5
    join: float = 5.0
    mesh: int = 64
    on_death: OnDeath = "rebuild"
    masked: float = 0.2
    degraded_steps: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.racks <= self.hosts <= self.ranks:
            raise ValueError(
                f"racks={self.racks}, hosts={self.hosts}, ranks={self.ranks}: need 1 <= racks <= hosts <= ranks"
            )
        if not 1 <= self.min_size <= self.ranks or self.spares < 0 or self.steps < 0 or self.compute <= 0:
            raise ValueError("need 1 <= min_size <= ranks, spares >= 0, steps >= 0 and compute > 0")
        self.timeouts()

    def timeouts(self) -> Timeouts:
        return Timeouts(heartbeat=self.heartbeat, suspect=self.suspect, join=self.join)

    def host_of(self, process: int) -> int:
        """The host of one of the processes started at the beginning."""
        if process < self.ranks:
            return process * self.hosts // self.ranks
        return self.hosts - 1 - (process - self.ranks) % self.hosts

    def rack_of(self, host: int) -> int:
        return host * self.racks // self.hosts


class NetworkModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model of the network between hosts. Times in seconds.

    `latency` is the median of a lognormal distribution, `spread` its sigma. A share `loss` of the time a path loses
    everything, in bursts of `burst` on average; of these bursts a share `shared` hits all paths of a host at once.
    A lost message is sent again after `retransmit` (0: never); heartbeats never are. `duplicate` and `reorder` are the
    shares of messages that arrive twice, or late by up to `reorder_delay`. `register` is the median time to the
    register and back. Within a host a message takes `local`.
    """

    latency: float = 0.0002
    spread: float = 0.5
    loss: float = 0.0
    burst: float = 0.02
    shared: float = 0.0
    retransmit: float = 0.2
    duplicate: float = 0.0
    reorder: float = 0.0
    reorder_delay: float = 0.05
    register: float = 0.002
    local: float = 0.00003

    def __post_init__(self) -> None:
        for name in ("loss", "shared", "duplicate", "reorder"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a share of 0 to below 1")
        if min(self.latency, self.burst, self.register, self.local) <= 0 or min(self.spread, self.retransmit) < 0:
            raise ValueError("latency, burst, register and local must be above 0, spread and retransmit not below")


class MachineModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process costs the machine that all processes share. Times in seconds.

    With `cores` 0 every process has a processor of its own, and needs no time of it. Else all processes of the world
    share so many cores: a message takes `message` of one, a call of its register `register`, an op `op`, and a new
    communicator `connect`. The kernel reports the end of a process after `gone`, and a session's thread pauses for
    `thread` between two points of the protocol, on average. A share `late` of short timers ring late.
    """

    cores: int = 0
    message: float = 0.0
    further: float = 0.0
    register: float = 0.0
    op: float = 0.0
    connect: float = 0.0
    gone: float = 0.0004
    thread: float = 0.00005
    late: float = 0.25

    def __post_init__(self) -> None:
        if min(msgspec.structs.astuple(self)) < 0:
            raise ValueError("the times and shares of a machine are not negative")


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One simulation: equal schedules have equal traces.

    After the end of the last fault the job has `bound` seconds to make progress.
    """

    seed: int = 0
    layout: JobLayout = msgspec.field(default_factory=JobLayout)
    network: NetworkModel = msgspec.field(default_factory=NetworkModel)
    faults: tuple[Fault, ...] = ()
    bound: float = 8.0
    machine: MachineModel = msgspec.field(default_factory=MachineModel)

    def __post_init__(self) -> None:
        for fault in self.faults:
            _check(fault, self.layout)

    def ends(self) -> float:
        """The time at which the last fault ends."""
        return max((fault.at + float(getattr(fault, "seconds", 0.0)) for fault in self.faults), default=0.0)


def _check(fault: Fault, layout: JobLayout) -> None:
    if fault.at < 0 or getattr(fault, "seconds", 0.0) < 0:
        raise ValueError(f"{fault}: times are not negative")
    limits = {"process": layout.ranks + layout.spares, "host": layout.hosts, "rack": layout.racks}
    limits |= {"source": layout.hosts, "target": layout.hosts}
    for name, limit in limits.items():
        value = getattr(fault, name, 0)
        if not 0 <= value < limit:
            raise ValueError(f"{fault}: {name} {value} is out of range, 0 to {limit - 1}")
    if isinstance(fault, PartitionHosts) and not all(0 <= host < layout.hosts for host in fault.hosts):
        raise ValueError(f"{fault}: there are hosts 0 to {layout.hosts - 1}")
    if isinstance(fault, KillShare) and not 0 < fault.share < 1:
        raise ValueError(f"{fault}: share must be above 0 and below 1")


def load(path: Path) -> Schedule:
    """Read a schedule from a TOML (by its name) or JSON file. Raises ValueError for an invalid one, and OSError."""
    data = path.read_bytes()
    try:
        if path.suffix == ".toml":
            return msgspec.toml.decode(data, type=Schedule)
        return msgspec.json.decode(data, type=Schedule)
    except UNDECODABLE as error:
        raise ValueError(f"{path} is no schedule: {error}") from error


def save(schedule: Schedule, path: Path) -> None:
    """Write a schedule as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(schedule), indent=2) + b"\n")
