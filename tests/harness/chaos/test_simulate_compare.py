"""`holdfast simulate --compare`: times are read off event logs, errors are stated, and real processes come near."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from holdfast.ft import events
from holdfast.ft.console.console import console
from holdfast.harness.cli import app
from holdfast.harness.simulate.compare import (
    Comparison,
    RecoveryMoments,
    cases_table,
    error_of,
    middle,
    predict,
    recovery_of,
)
from holdfast.harness.simulate.core.schedule import MachineModel
from holdfast.harness.simulate.machine_costs import MachineCosts

COSTS = MachineCosts(
    ranks=4,
    backend="shm",
    cores=2,
    link=5e-5,
    spread=0.5,
    message=2e-4,
    read=2e-5,
    write=3e-5,
    connect=1e-3,
    op=3e-4,
    gone=1e-3,
)


def installed(process: str, epoch: int, time: float, members: tuple[str, ...]) -> events.Event:
    event = events.ViewInstalled(epoch=epoch, members=members, rank=0, min_size=1, reason="")
    return events.stamped(event, process, 1, time)


def committed(process: str, epoch: int, time: float, how: str = "normal") -> events.Event:
    return events.stamped(events.StepCommitted(step=7, epoch=epoch, how=how), process, 1, time)


LOG = [
    installed("a", 4, 1.0, ("a", "b", "c")),
    committed("a", 4, 1.9),
    committed("b", 4, 2.01),  # after the fault, of the old view
    installed("b", 5, 2.1, ("a", "b")),
    installed("a", 5, 2.3, ("a", "b")),
    committed("b", 5, 2.35, "recovered"),
    committed("b", 5, 2.5),
    committed("a", 5, 2.4),
    committed("a", 5, 2.9),
]


def test_the_last_survivor_gives_the_times() -> None:
    assert recovery_of(LOG, 2.0, {"c"}) == RecoveryMoments(pytest.approx(0.3), pytest.approx(0.5))


def test_a_recovery_is_over_when_all_survivors_have_committed() -> None:
    assert recovery_of(LOG[:7], 2.0, {"c"}) is None
    assert recovery_of([], 2.0, {"c"}) is None


def test_an_error_is_a_share_of_what_was_measured() -> None:
    assert error_of(0.9, 1.0) == pytest.approx(0.1)
    assert error_of(1.1, 1.0) == pytest.approx(0.1)
    assert middle([RecoveryMoments(1, 5), RecoveryMoments(3, 4), RecoveryMoments(2, 9)]) == RecoveryMoments(2, 5)


def test_the_table_has_predictions_measurements_and_errors() -> None:
    case = Comparison(
        "kill",
        4,
        1,
        "shm",
        RecoveryMoments(0.006, 0.011),
        RecoveryMoments(0.005, 0.01),
        (RecoveryMoments(0.005, 0.01),),
    )
    out = console()
    with out.capture() as printed:
        out.print(cases_table([case]), width=200)
    for text in ("kill", "4 over shm", "6 ms", "5 ms", "20%", "11 ms", "10 ms", "10%"):
        assert text in printed.get()


def test_costs_are_times_of_the_simulated_protocol() -> None:
    """A slower machine is slower to install the next view and to commit; a stop is noticed after the suspect time."""
    usual = predict("kill", 4, COSTS, seed=0)
    slow = MachineCosts(**{f: getattr(COSTS, f) for f in COSTS.__struct_fields__} | {"message": 2e-3, "connect": 0.1})
    slower = predict("kill", 4, slow, seed=0)
    assert 0 < usual.view < usual.commit < 0.1
    assert usual.view < slower.view
    assert slower.commit - slower.view > 0.075  # three survivors share the connecting of four on as many cores
    assert 0.3 < predict("stop", 4, COSTS, seed=0).view < 0.7
    assert 0.3 < predict("host", 4, COSTS, seed=0).view < 0.7


def test_what_a_machine_costs_is_not_negative() -> None:
    with pytest.raises(ValueError, match="not negative"):
        MachineModel(cores=-1)


@pytest.mark.thorough  # it starts a job of four processes for each fault, and measures the machine first
def test_the_command_compares_with_real_processes() -> None:
    run = CliRunner().invoke(app.app, ["simulate", "--compare", "--ranks", "4", "--repeats", "1", "--json"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    faults = [case["fault"] for case in result["cases"]]
    assert faults[:2] == ["kill", "stop"]
    assert "host" in faults or "loss of a host" in result["left_out"][0]
    assert all(0 < case["measured"]["view"] <= case["measured"]["commit"] for case in result["cases"])
    assert result["median_error"] < 1.0
