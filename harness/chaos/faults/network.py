"""Faults of the network: of links between ranks, through the proxy, and of hosts that are network namespaces (as root).

Faults of links break every transport over TCP, and the control channel; the job must have `links = true`. `source` and
`target` are ranks, or lists of them; without one of them: all others. `plane` is "control" (heartbeats, views),
"data", or "all".

"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

from holdfast.ft.console.units import counted
from holdfast.harness.chaos.fault_type import FaultType, Undo
from holdfast.harness.chaos.faults.process import ProcessFault
from holdfast.harness.chaos.run.process_set import NoTargetProcess, Victim
from holdfast.harness.links.policy import CUT, LinkPolicy, LinkRule, Plane, between, unbreakable

if TYPE_CHECKING:
    from holdfast.harness.chaos.run.fault_context import FaultContext
    from holdfast.harness.chaos.scenario import Scenario
    from holdfast.harness.testbed.netns import Network

Ranks = int | tuple[int, ...] | None
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class _LinkFault(FaultType, frozen=True, kw_only=True):
    def check(self, scenario: Scenario) -> None:
        if scenario.workload.family != "session" or not scenario.job.links:
            raise ValueError("faults of links need job.links = true")
        job = scenario.job
        why = None if self.control_alone else unbreakable(job.backend, job.environ, many_hosts=job.hosts != "one")
        if why is not None:
            raise ValueError(f'{why}; use gloo, or plane = "control"')
        for rank in self.named:
            if not 0 <= rank < scenario.job.ranks:
                raise ValueError(f"no rank {rank} ({counted(scenario.job.ranks, 'rank')})")

    def stalls(self, scenario: Scenario) -> str:
        """On one host the kernel tells which processes live: silence evicts no member, and the job waits for bytes."""
        if not self.silences or self.control_alone or scenario.job.hosts != "one":
            return ""
        return "on one host a rank that is cut off is known to be alive: it is not evicted, and the job waits for it"

    @property
    def silences(self) -> bool:
        """Whether no byte passes."""
        return False

    @property
    def named(self) -> tuple[int, ...]:
        """The ranks that the fault names."""
        return ()

    @property
    def control_alone(self) -> bool:
        """Whether nothing but the control channel is broken."""
        return False


class _DirectedLinkFault(_LinkFault, frozen=True, kw_only=True):
    """A policy for what goes from `source` to `target`, and back unless `one_way`."""

    source: Ranks = None
    target: Ranks = None
    one_way: bool = False
    plane: Plane = "all"

    @property
    def named(self) -> tuple[int, ...]:
        return (*_listed(self.source), *_listed(self.target))

    @property
    def control_alone(self) -> bool:
        return self.plane == "control"

    def policy(self) -> LinkPolicy:
        """What happens to the bytes."""
        raise NotImplementedError

    def inject(self, context: FaultContext) -> Undo | None:
        sources, targets = (context.pids(_listed(ranks)) for ranks in (self.source, self.target))
        ways = [(sources, targets)] if self.one_way or sources == targets else [(sources, targets), (targets, sources)]
        context.note(type(self).__name__.lower(), context.found(sources | targets), self.words())
        return context.rule(
            LinkRule(policy=self.policy(), sources=source, targets=target, plane=self.plane) for source, target in ways
        )

    def words(self) -> str:
        sign = "→" if self.one_way else "↔"
        plane = "" if self.plane == "all" else f", {self.plane} channel"
        return f"{self.summary}: {_named(self.source)} {sign} {_named(self.target)}{plane}"


class Cut(_DirectedLinkFault, frozen=True, kw_only=True):
    """Nothing passes, and no end is told: packets vanish."""

    summary: ClassVar[str] = "link cut"
    counter: ClassVar[str] = "held"

    @property
    def silences(self) -> bool:
        return True

    def policy(self) -> LinkPolicy:
        return CUT


class Delay(_DirectedLinkFault, frozen=True, kw_only=True):
    """Every byte comes `seconds` late, and up to `jitter` more."""

    summary: ClassVar[str] = "link delayed"
    counter: ClassVar[str] = "held"
    seconds: NonNegative = 0.005
    jitter: NonNegative = 0.0

    def policy(self) -> LinkPolicy:
        return LinkPolicy(delay=self.seconds, jitter=self.jitter)


class SlowLink(_DirectedLinkFault, frozen=True, kw_only=True):
    """No more than `megabytes` a second pass."""

    summary: ClassVar[str] = "slow link"
    counter: ClassVar[str] = "held"
    megabytes: Annotated[float, Meta(gt=0)] = 10.0

    def policy(self) -> LinkPolicy:
        return LinkPolicy(rate=self.megabytes * 1e6)


class Lossy(_DirectedLinkFault, frozen=True, kw_only=True):
    """A `share` of the segments is lost; each costs TCP's least retransmission time, 200 ms."""

    summary: ClassVar[str] = "lossy link"
    counter: ClassVar[str] = "lost"
    share: Share = 0.02

    def policy(self) -> LinkPolicy:
        return LinkPolicy(loss=self.share)


class Corrupt(_DirectedLinkFault, frozen=True, kw_only=True):
    """Flips one bit in a `share` of the pieces of payload.

    Payload is every piece of 4 KiB or more; with `headers` bits also flip in smaller pieces.
    """

    summary: ClassVar[str] = "bits flipped on the link"
    counter: ClassVar[str] = "corrupted"
    share: Share = 0.1
    headers: bool = False

    def policy(self) -> LinkPolicy:
        return LinkPolicy(corrupt=self.share, headers=self.headers)


class Reset(_DirectedLinkFault, frozen=True, kw_only=True):
    """Connections are reset, and new ones too while it lasts."""

    summary: ClassVar[str] = "connections reset"
    counter: ClassVar[str] = "reset"

    def policy(self) -> LinkPolicy:
        return LinkPolicy(reset=True)


class Partition(_LinkFault, frozen=True, kw_only=True):
    """Nothing passes between `groups` of ranks; ranks in no group form one more."""

    summary: ClassVar[str] = "network partitioned"
    counter: ClassVar[str] = "held"
    groups: tuple[tuple[int, ...], ...]

    @property
    def silences(self) -> bool:
        return True

    def check(self, scenario: Scenario) -> None:
        _LinkFault.check(self, scenario)
        if len(self.named) != len(set(self.named)) or not self.groups:
            raise ValueError("groups: at least one, and every rank in one group at most")

    @property
    def named(self) -> tuple[int, ...]:
        return tuple(rank for group in self.groups for rank in group)

    def inject(self, context: FaultContext) -> Undo | None:
        groups = [context.pids(group) for group in self.groups]
        context.note("partition", context.found(frozenset().union(*groups)), self.words())
        return context.rule(between(groups, context.everybody()))

    def words(self) -> str:
        return f"{self.summary}: {' | '.join(', '.join(map(str, group)) for group in self.groups)}"


def _listed(ranks: Ranks) -> tuple[int, ...]:
    return () if ranks is None else ranks if isinstance(ranks, tuple) else (ranks,)


def _named(ranks: Ranks) -> str:
    return ", ".join(f"rank {rank}" for rank in _listed(ranks)) or "all"


# Hosts and their cables -----------------------------------------------------------------------------------------------


HOSTS_NEEDED = 'needs job.hosts = "namespaces", or workload.hosts of reinforcement learning (as root)'


class HostLost(FaultType, frozen=True, kw_only=True):
    """A host is lost: its cable is pulled, and its processes are killed, so that no other host is told.

    `host` is its number; by default it is the last one. In reinforcement learning the driver is on host 0.
    """

    summary: ClassVar[str] = "a host is lost"
    host: Annotated[int, Meta(ge=0)] | None = None

    def check(self, scenario: Scenario) -> None:
        count = scenario.own_hosts
        if count == 0:
            raise ValueError(f"host-lost {HOSTS_NEEDED}")
        if self.host is not None and self.host >= count:
            raise ValueError(f"host = {self.host}: there are hosts 0 to {count - 1}")
        if self.host == 0 and scenario.workload.family == "rl":
            raise ValueError("host = 0: the driver is there, and nothing would resume it on another host")

    def inject(self, context: FaultContext) -> Undo | None:
        network = context.hosts()
        number = len(network.addresses) - 1 if self.host is None else self.host
        there = context.everybody() & set(network.processes(number))
        if not there:
            raise NoTargetProcess(f"no process of the job is on host {number}")
        context.note("host-lost", context.found(there), f"host {number}")
        network.lose(number)
        return None

    def words(self) -> str:
        return self.summary if self.host is None else f"host {self.host} is lost"


class LinkCut(ProcessFault, frozen=True, kw_only=True):
    """The cable of the host of a process is broken.

    `how`: "pulled" (nothing in or out), "mute" (what the host sends is lost), "deaf" (what is sent to it is lost), or
    "slow" (no more than `megabits` a second).
    """

    summary: ClassVar[str] = "the cable of a host"
    how: Literal["pulled", "mute", "deaf", "slow"] = "pulled"
    megabits: Annotated[float, Meta(gt=0)] = 10.0

    def check(self, scenario: Scenario) -> None:
        ProcessFault.check(self, scenario)
        if scenario.own_hosts == 0:
            raise ValueError(f"link-cut {HOSTS_NEEDED}")

    def inject(self, context: FaultContext) -> Undo | None:
        victims = self.victims(context)
        network = context.hosts()
        numbers = [_host_of(network, victim) for victim in victims]
        context.note("link-cut", victims, self.how)
        for number in numbers:
            match self.how:
                case "pulled":
                    network.cut(number)
                case "mute":
                    network.mute(number)
                case "deaf":
                    network.deafen(number)
                case "slow":
                    network.throttle(number, int(self.megabits * 1e6))

        def heal() -> None:
            for number in numbers:
                network.heal(number)

        return heal

    def words(self) -> str:
        return f"{ProcessFault.words(self)} ({self.how})"


def _host_of(network: Network, victim: Victim) -> int:
    found = network.host_of(victim.process.pid)
    if found is None:
        raise NoTargetProcess(f"{victim} is on none of the hosts")
    return found
