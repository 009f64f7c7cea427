"""Faults of the cables between hosts that are network namespaces. Need root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

from holdfast.harness.chaos.faults.process import ProcessFault
from holdfast.harness.chaos.scenario.fault_type import Undo

if TYPE_CHECKING:
    from holdfast.harness.chaos.run.fault_context import FaultContext
    from holdfast.harness.chaos.scenario.scenario import Scenario


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
        if scenario.workload.family != "session" or scenario.job.hosts != "namespaces":
            raise ValueError('link-cut needs job.hosts = "namespaces" (as root)')

    def inject(self, context: FaultContext) -> Undo | None:
        victims = self.victims(context)
        network = context.hosts().network
        numbers = [context.hosts().of(victim.process.pid) for victim in victims]
        context.note("link-cut", victims, how=self.how)
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
