"""The simulator: how long it takes to simulate a recovery, and what the recovery takes in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from benchmarks.common import profile

if TYPE_CHECKING:
    from holdfast.harness.simulate.run import SimulationResult


class Simulation:
    """One scenario at so many ranks, on one core. Virtual times are results of the protocol, not of a machine."""

    params: ClassVar = (["host-loss"], profile([1_000], [1_000, 10_000, 100_000]))
    param_names: ClassVar = ["scenario", "ranks"]
    rounds = 1
    repeat = (1, 3, 20.0)
    number = 1
    timeout = 600

    def time_scenario(self, scenario: str, ranks: int) -> None:
        _measure(scenario, ranks)

    def peakmem_scenario(self, scenario: str, ranks: int) -> None:
        _measure(scenario, ranks)

    def track_messages(self, scenario: str, ranks: int) -> float:
        return _measure(scenario, ranks).messages_mean

    def track_bytes(self, scenario: str, ranks: int) -> float:
        return _measure(scenario, ranks).bytes_mean

    def track_recovery(self, scenario: str, ranks: int) -> float:
        recovery = _measure(scenario, ranks).recovery()
        assert recovery is not None
        return 1e3 * recovery

    track_messages.unit = "messages a rank"  # type: ignore[attr-defined]
    track_bytes.unit = "bytes a rank"  # type: ignore[attr-defined]
    track_recovery.unit = "ms of virtual time"  # type: ignore[attr-defined]


def _measure(name: str, ranks: int) -> SimulationResult:
    """Simulate the scenario. Raises ArithmeticError if an invariant is broken."""
    from holdfast.harness.simulate.draw import scenario
    from holdfast.harness.simulate.run import simulate

    found = simulate(scenario(name, ranks, ranks // 8, seed=7))
    if found.violation is not None:
        raise ArithmeticError(f"{found.violation}")
    return found
