"""A bit of published weights flips in a holder's memory; the checksum must show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from holdfast.ft.processes.zygote_client import ForkedProcess
from holdfast.harness.chaos.faults.process import ProcessFault
from holdfast.harness.chaos.scenario.fault_type import Undo
from holdfast.harness.chaos.workloads.orders import FlipBit

if TYPE_CHECKING:
    from holdfast.harness.chaos.run.fault_context import FaultContext
    from holdfast.harness.chaos.scenario.scenario import Scenario


class CorruptMemory(ProcessFault, frozen=True, kw_only=True):
    """One bit of the newest version flips in the memory of a holder; the stored checksum stays."""

    summary: ClassVar[str] = "a bit flips in memory"

    def check(self, scenario: Scenario) -> None:
        if scenario.workload.family != "store" or self.names not in ((), ("holder",)):
            raise ValueError('corrupt-memory is for the store, and for who = "holder"')

    def inject(self, context: FaultContext) -> Undo | None:
        victims = context.find("newest holder")
        context.note("corrupt-memory", victims)
        for victim in victims:
            assert isinstance(victim.process, ForkedProcess)
            victim.process.channel.send(FlipBit())
        return None
