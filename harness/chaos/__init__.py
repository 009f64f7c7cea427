"""Chaos on real processes: break a job in the ways of a data centre, check every invariant, judge.

From a shell `holdfast chaos run`. From Python, or under pytest by the fixture of the same name:

def test_training_survives(chaos):
    run = chaos.run(train, 100, ranks=3, spares=1, faults=[chaos.kill(1, step=40)])
    run.check()                                   # invariants held, and the result has the bits of a run without faults
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.harness.chaos.api import (
        ChaosFailed,
        Result,
        corrupt,
        cut,
        delay,
        fault,
        flap,
        kill,
        lossy,
        partition,
        pause,
        register_away,
        run,
        run_scenario,
        slow,
        slow_link,
    )
    from holdfast.harness.chaos.fault_type import FaultType
    from holdfast.harness.chaos.planning import schedule
    from holdfast.harness.chaos.scenario import BadScenario, Scenario, load, parse
    from holdfast.harness.chaos.stage import Stage

_API = (
    "ChaosFailed",
    "Result",
    "corrupt",
    "cut",
    "delay",
    "fault",
    "flap",
    "kill",
    "lossy",
    "partition",
    "pause",
    "register_away",
    "run",
    "run_scenario",
    "slow",
    "slow_link",
)
_HOMES = {
    **dict.fromkeys(_API, "api"),
    **dict.fromkeys(("BadScenario", "Scenario", "load", "parse"), "scenario"),
    "FaultType": "fault_type",
    "Stage": "stage",
    "schedule": "planning",
}

__all__ = [
    "BadScenario",
    "ChaosFailed",
    "FaultType",
    "Result",
    "Scenario",
    "Stage",
    "corrupt",
    "cut",
    "delay",
    "fault",
    "flap",
    "kill",
    "load",
    "lossy",
    "parse",
    "partition",
    "pause",
    "register_away",
    "run",
    "run_scenario",
    "schedule",
    "slow",
    "slow_link",
]


def __getattr__(name: str) -> Any:
    """Import on demand: the `holdfast` command must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
