"""Faults of hosts that are network namespaces, and of the cables between them. Need root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

from holdfast.harness.chaos.faults.process import ProcessFault
from holdfast.harness.chaos.run.process_set import NoTargetProcess, Victim
from holdfast.harness.chaos.scenario.fault_type import FaultType, Undo

if TYPE_CHECKING:
    from holdfast.harness.chaos.run.fault_context import FaultContext
    from holdfast.harness.chaos.scenario.scenario import Scenario
    from holdfast.harness.testbed.netns import Network


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
