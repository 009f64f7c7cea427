"""Chaos on real processes: inject the faults of a data centre into a job, check every invariant.

From a shell `holdfast chaos run`. From Python, or under pytest by the fixture of the same name:

def test_training_survives(chaos):
    run = chaos.run(train, 100, ranks=3, spares=1, faults=[chaos.kill(1, step=40)])
    run.check()                                   # invariants held, and the result has the bits of a fault-free run
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.ft import on_demand

if TYPE_CHECKING:
    from holdfast.harness.chaos.api import (
        fault,
        kill,
        pause,
        run,
        run_scenario,
    )
    from holdfast.harness.chaos.fault_type import FaultType
    from holdfast.harness.chaos.run.fault_context import FaultContext
    from holdfast.harness.chaos.run.scenario_runner import ChaosFailed, Result
    from holdfast.harness.chaos.run.session_processes import report_state
    from holdfast.harness.chaos.scenario import BadScenario, Scenario, load, parse, schedule

__all__ = [
    "BadScenario",
    "ChaosFailed",
    "FaultContext",
    "FaultType",
    "Result",
    "Scenario",
    "fault",
    "kill",
    "load",
    "parse",
    "pause",
    "report_state",
    "run",
    "run_scenario",
    "schedule",
]

_HOMES = {
    **dict.fromkeys(__all__, "holdfast.harness.chaos.api"),
    **dict.fromkeys(("BadScenario", "Scenario", "load", "parse"), "holdfast.harness.chaos.scenario"),
    "FaultType": "holdfast.harness.chaos.fault_type",
    **dict.fromkeys(("ChaosFailed", "Result"), "holdfast.harness.chaos.run.scenario_runner"),
    "FaultContext": "holdfast.harness.chaos.run.fault_context",
    "report_state": "holdfast.harness.chaos.run.session_processes",
    "schedule": "holdfast.harness.chaos.scenario",
}

__getattr__ = on_demand(_HOMES)
