"""The simulator: equal seeds give equal runs, it drives the production classes, and it finds known bugs."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from holdfast.ft import events
from holdfast.ft.console.console import console
from holdfast.ft.membership.state_machine import Membership
from holdfast.ft.membership.view import OnDeath
from holdfast.harness.invariants import Event
from holdfast.harness.simulate import compare
from holdfast.harness.simulate.core import faults
from holdfast.harness.simulate.core.schedule import JobLayout, NetworkModel, Schedule, load, save
from holdfast.harness.simulate.core.world import World
from holdfast.harness.simulate.draw import MOST_WITH_STEPS, SCENARIOS, draw, scenario
from holdfast.harness.simulate.known_bugs.reproduce import KNOWN_BUGS, reproduce, run_all
from holdfast.harness.simulate.run import simulate as run
from holdfast.harness.simulate.show import known_bug_named
from holdfast.harness.simulate.shrink import shrink
from support.programs.forked_programs import run_python, said, said_as_json

TRACES = """
import sys
from holdfast.harness.simulate.draw import draw, scenario
from holdfast.harness.simulate.run import simulate
for seed in (3, 10, 21):
    print(simulate(draw(seed)).trace)
print(simulate(scenario("host-loss", 256, 32, 7)).trace)
"""


def played(schedule: Schedule) -> list[Event]:
    """The events of a run that breaks no invariant."""
    seen: list[Event] = []
    assert run(schedule, also=seen.append).violation is None, schedule
    return seen


def test_equal_seeds_give_equal_traces_with_a_line_for_each_event_in_other_processes_too() -> None:
    lines: list[str] = []
    outcome = run(draw(3), lines.append)
    here = [outcome.trace, *(run(draw(seed)).trace for seed in (10, 21)), run(scenario("host-loss", 256, 32, 7)).trace]
    assert len(set(here)) == 4
    assert run_python("-c", TRACES, environ={**os.environ, "PYTHONHASHSEED": "12345"}).split() == here
    assert all(line.endswith("\n") for line in lines)
    times = [float(line.split()[0]) for line in lines]
    assert times == sorted(times)
    assert sum(" committed " in line for line in lines) >= outcome.steps


# Production classes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "killed"),
    [
        (faults.BreakDetector(at=0.2, process=0, detector="observers"), faults.KillHost(at=0.5, host=1)),
        (faults.BreakDetector(at=0.159, process=1, detector="observers"), faults.KillProcess(at=0.25, process=0)),
    ],
)
def test_a_detector_that_raises_is_replaced_and_the_job_outlives_the_other_host(
    broken: faults.BreakDetector, killed: faults.Fault
) -> None:
    layout = JobLayout(ranks=2, hosts=2, racks=2, spares=0, steps=10)
    seen = played(Schedule(layout=layout, faults=(broken, killed)))
    assert [event.detector for event in seen if isinstance(event, events.DetectorLost)] == ["observers"]
    assert {event.process for event in seen if event.kind == "finished"} == {f"p{broken.process}"}


def test_a_signal_that_the_kernel_refuses_is_sent_again() -> None:
    planned = (faults.RefuseSignals(at=0.3, host=0, seconds=2.0), faults.PauseProcess(at=0.3, process=0, seconds=4.0))
    seen = played(Schedule(layout=JobLayout(ranks=4, hosts=2, racks=1), faults=planned))
    fenced = [event for event in seen if isinstance(event, events.FenceFailed | events.MemberFenced)]
    assert [type(event) for event in fenced] == [events.FenceFailed, events.MemberFenced]
    assert any(isinstance(event, events.ProcessDied) and event.process == "p0" for event in seen)


@pytest.mark.parametrize("writes", [False, True])
def test_a_proposal_without_an_answer_is_found_in_the_register_or_given_up_and_made_again(writes: bool) -> None:
    planned = (faults.KillProcess(at=0.3, process=3), faults.LoseProposals(at=0.2, seconds=0.5, writes=writes))
    seen = played(Schedule(layout=JobLayout(ranks=4, hosts=2, racks=1, spares=0), faults=planned, bound=18.0))
    late = [event for event in seen if isinstance(event, events.RegisterUnreachable)]
    assert bool(late) is not writes
    assert all("did not answer within 10 s" in event.reason for event in late)


def test_a_clock_that_jumps_makes_nobody_suspect() -> None:
    seen = played(Schedule(faults=(faults.JumpClock(at=0.5, host=0, forward=5.0),)))
    assert not [event for event in seen if isinstance(event, events.MemberSuspected | events.MemberFenced)]


# Nothing breaks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1000, 2000])
def test_no_seed_breaks_an_invariant(first: int) -> None:
    kinds: set[str] = set()
    for seed in range(first, first + 40):
        schedule = draw(seed)
        kinds |= {type(fault).__name__ for fault in schedule.faults}
        outcome = run(schedule)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
    assert len(kinds) > 8


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "quiet"])
def test_every_survivor_of_many_ranks_installs_the_next_view(name: str) -> None:
    ranks = 1000 if name == "rack-loss" else 512  # of more ranks a rack is a smaller share
    result = run(scenario(name, ranks, ranks // 8, 1))
    assert result.violation is None
    assert result.installed is not None and result.detected is not None
    assert result.detected < 0.5
    assert result.depth <= 12
    assert result.messages_mean < 40


@pytest.mark.parametrize(
    "cut",
    [
        faults.PartitionHosts(at=0.3, hosts=(0,), seconds=3.0, register=True),
        faults.CutPath(at=0.3, source=0, target=1, seconds=3.0),
    ],
)
@pytest.mark.parametrize("ranks", [4, 5])
def test_the_host_with_the_first_rank_goes_on_after_a_partition(ranks: int, cut: faults.Fault) -> None:
    """The first host has at least half of the ranks. Neither host hears the other, or only the second does not."""
    schedule = Schedule(layout=JobLayout(ranks=ranks, hosts=2, racks=1, spares=0, steps=40), faults=(cut,))
    for seed in range(10):
        seen = played(replace(schedule, seed=seed))
        finished = {event.process for event in seen if event.kind == "finished"}
        assert finished == {f"p{rank}" for rank in range((ranks + 1) // 2)}, seed


def test_the_load_of_a_rank_does_not_grow_with_the_number_of_ranks() -> None:
    small, large = (run(scenario("host-loss", ranks, ranks // 8, 3)) for ranks in (256, 2048))
    assert large.depth <= small.depth + 4
    assert large.messages_max <= 1.5 * small.messages_max
    assert large.bytes_max <= 1.5 * small.bytes_max
    assert large.installed is not None and small.installed is not None
    assert large.installed < small.installed + 0.1


def test_the_loss_of_a_host_is_reported_in_few_messages() -> None:
    """A lost host has many members, and each survivor suspects them all: it tells of those of one turn together."""
    layout = JobLayout(ranks=32, hosts=4, racks=1, spares=0, steps=10**6)
    world = World(Schedule(3, layout, faults=(faults.KillHost(at=1.0, host=3),)), lambda event: None)
    heard: Counter[tuple[str, str]] = Counter()

    def count(event: str, who: str, what: str) -> None:
        if what == "suspect":
            heard[who, what] += 1

    world.trace = count  # type: ignore[method-assign]
    world.run(3.0)
    survivors, lost = 24, 8
    assert all(len(process.core.view.members) == survivors for process in world.processes if process.alive)
    assert 0 < heard.total() < survivors * (survivors - 1) * lost / 2


def test_a_job_without_steps_that_never_recovers_breaks_an_invariant() -> None:
    """Nobody proposes a view in place of the dead, and the survivors keep the old one for good."""
    schedule = scenario("first-host-loss", 8, 2, 0)
    recovered = run(schedule)
    assert recovered.violation is None and recovered.installed is not None
    with known_bug_named("proposer death").inject():
        stuck = run(schedule)
    assert stuck.installed is None
    assert stuck.violation is not None and stuck.violation.invariant == "a healed job ends"
    assert "installed epoch 1" in stuck.violation.message


@pytest.mark.parametrize("steps", [0, 5], ids=["without steps", "with steps"])
def test_a_job_that_never_begins_breaks_an_invariant(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody proposes a first view, and all wait for it."""
    schedule = Schedule(layout=JobLayout(ranks=4, hosts=2, racks=1, steps=steps, form=True))
    assert run(schedule).violation is None
    propose = Membership._next_proposal
    monkeypatch.setattr(Membership, "_next_proposal", lambda core: core.view and propose(core))
    stuck = run(schedule)
    assert stuck.epochs == 0
    assert stuck.violation is not None and stuck.violation.invariant == "a healed job ends"
    assert "has not ended" in stuck.violation.message and "the last it said: joined at" in stuck.violation.message


def test_a_job_in_which_everybody_gives_up_breaks_an_invariant() -> None:
    schedule = Schedule(layout=JobLayout(ranks=4, hosts=2, racks=1), faults=(faults.KillProcess(at=0.3, process=3),))
    assert run(schedule).violation is None
    with known_bug_named("everybody gives up").inject():
        given_up = run(schedule)
    assert given_up.violation is not None
    assert given_up.violation.invariant == "a job with enough members finishes"
    assert "rebuild (op 1) timed out" in given_up.violation.message


def test_a_run_without_faults_has_one_epoch() -> None:
    result = run(scenario("quiet", 256, 32, 1))
    assert (result.epochs, result.detected, result.messages_max) == (1, None, 0)


ONCE_BROKEN = {
    "stopped by the view before": Schedule(
        seed=38,
        layout=JobLayout(ranks=10, hosts=5, racks=5, steps=1, join=3.0),
        network=NetworkModel(reorder=0.15, reorder_delay=0.5),
        faults=(
            faults.KillHost(host=0, at=0.05),
            faults.DriftClock(process=3, share=-0.05, at=0.1),
            faults.KillHost(host=4, at=0.02),
        ),
    ),
    "dead process confirmed": Schedule(
        seed=343,
        layout=JobLayout(ranks=3, hosts=3, racks=3, spares=2, steps=1, join=3.0),
        faults=(
            faults.DriftClock(process=2, share=-0.05, at=0.164),
            faults.SlowProcess(process=2, delay=0.01, seconds=0.64, at=0.151),
            faults.SlowProcess(process=0, delay=0.1, seconds=0.08, at=0.018),
            faults.PauseProcess(process=1, seconds=0.8, at=0.181),
            faults.PauseProcess(process=1, seconds=0.05, at=0.027),
        ),
    ),
}
"""By the name of a known bug that this simulator has found in nodes: a schedule that showed it."""


@pytest.mark.parametrize("name", ONCE_BROKEN)
def test_a_schedule_that_once_broke_an_invariant_breaks_none(name: str) -> None:
    schedules = [replace(ONCE_BROKEN[name], seed=seed) for seed in range(20)]
    assert all(run(schedule).violation is None for schedule in schedules)
    with known_bug_named(name).inject():
        assert any(run(schedule).violation is not None for schedule in schedules)


# Schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_death", ["finish_step", "go_on"])
def test_a_rank_that_is_masked_and_lives_commits_nothing_that_the_others_undo(on_death: OnDeath) -> None:
    seen: list[Event] = []
    for seed in range(8):
        layout = JobLayout(ranks=4, hosts=1, racks=1, spares=seed % 2, steps=20, join=3.0, on_death=on_death)
        paused = faults.PauseProcess(process=1, seconds=0.35, at=0.2 + seed * 0.011)
        killed = faults.KillProcess(process=2, at=0.25 + seed * 0.013)
        seen += played(Schedule(seed=seed, layout=layout, faults=(paused, killed)))
    assert any(isinstance(event, events.ViewInstalled) and event.over is not UNSET for event in seen)
    assert any(isinstance(event, events.SessionFailed) and "is masked" in event.error for event in seen)


def test_a_schedule_is_a_file_that_replays(tmp_path: Path) -> None:
    schedule = draw(11)
    save(schedule, tmp_path / "schedule.json")
    assert load(tmp_path / "schedule.json") == schedule
    toml = tmp_path / "schedule.toml"
    toml.write_text(
        "seed = 4\n[layout]\nranks = 6\nhosts = 3\n[network]\nloss = 0.01\n"
        '[[faults]]\nfault = "crash"\nat = 0.5\nprocess = 2\n'
        '[[faults]]\nfault = "isolate"\nat = 1\nhosts = [1]\nseconds = 0.5\n'
    )
    planned = (faults.KillProcess(at=0.5, process=2), faults.PartitionHosts(at=1, hosts=(1,), seconds=0.5))
    assert load(toml) == Schedule(4, JobLayout(ranks=6, hosts=3), NetworkModel(loss=0.01), planned)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"layout": {"ranks": 2, "hosts": 4}}',
        '{"layout": {"heartbeat": 1.0}}',
        '{"network": {"loss": 1.0}}',
        '{"network": {"latency": 0}}',
        '{"network": {"lost": 0.1}}',
        '{"machine": {"cores": -1}}',
        '{"faults": [{"fault": "crash", "at": 1, "process": 99}]}',
        '{"faults": [{"fault": "crash", "at": -1, "process": 0}]}',
        '{"faults": [{"fault": "isolate", "at": 1, "hosts": [9], "seconds": 1}]}',
        '{"faults": [{"fault": "at_point", "at": 1, "point": "nowhere"}]}',
        '{"faults": [{"fault": "flood", "at": 1}]}',
    ],
)
def test_an_impossible_schedule_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"schedule|point|ranks"):
        load(path)


def test_faults_at_points_of_the_protocol_are_injected_there() -> None:
    seen = played(Schedule(faults=(faults.AtPoint(at=0.3, point="commit.after_barrier", nth=3),)))
    died = [event.why for event in seen if isinstance(event, events.ProcessDied)]
    assert died == ["SIGKILL at commit.after_barrier"]


# Bugs are found ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "evicted rank returns",
        "commit by a minority",
        "commit by those believed alive",
        "newcomer a step behind",
        "stranded after a shrink",
    ],
)
def test_each_known_bug_is_found_and_shrunk(name: str) -> None:
    bug = known_bug_named(name)
    seen = reproduce(bug, seeds=400, tries=20)
    assert seen.found and seen.real
    assert seen.schedule is not None and seen.shrunk <= min(8, seen.events)


@pytest.mark.thorough
def test_several_known_bugs_are_searched_in_parallel_and_reported_as_found() -> None:
    names = ["joiners first", "last step dropped"]
    chosen = [place for place, bug in enumerate(KNOWN_BUGS) if bug.name in names]
    told: list[str] = []
    found = run_all(200, chosen=chosen, done=lambda sighting: told.append(sighting.name))
    assert [sighting.name for sighting in found] == names
    assert sorted(told) == names
    assert all(sighting.found and sighting.real for sighting in found)


def test_a_run_whose_messages_multiply_without_end_is_ended() -> None:
    """Without the limit this run had two million events and took gigabytes of memory."""
    bug = known_bug_named("stale announcement")
    with bug.inject():
        outcome = run(draw(254))
    assert outcome.violation is not None
    assert outcome.events < 100_000


def test_known_bugs_are_twenty_or_more_and_each_is_removed_at_the_end_of_its_block() -> None:
    assert len({bug.name for bug in KNOWN_BUGS}) == len(KNOWN_BUGS) >= 20
    for bug in KNOWN_BUGS:
        with bug.inject():
            pass
    assert run(draw(3)).violation is None


def test_shrinking_deletes_events_that_do_not_matter() -> None:
    planned = tuple(faults.KillProcess(at=round(0.1 + 0.01 * n, 3), process=n) for n in range(8))

    def fails(schedule: Schedule) -> bool:
        return any(isinstance(fault, faults.KillProcess) and fault.process == 5 for fault in schedule.faults)

    small = shrink(Schedule(layout=JobLayout(steps=20), network=NetworkModel(duplicate=0.1), faults=planned), fails)
    assert len(small.faults) == 1 and fails(small)
    assert small.network == NetworkModel()
    assert small.layout.steps == 1 and small.layout.spares == 0


# The command ------------------------------------------------------------------------------------------------------


def test_the_command_finds_shrinks_and_replays_a_bug(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    bug = ["--bug", "one accuser is enough"]
    search = ("--seed", "8", "--seeds", "200", "--shrink", "--out", found)
    outcome = said_as_json("simulate", *bug, *search, status=1)["outcomes"][-1]
    assert outcome["violation"]["invariant"] == "nobody healthy is evicted"
    assert len(load(found).faults) <= 8
    summary = found.with_suffix(".txt").read_text()
    assert "epoch 2 begins" in summary and "BROKEN" in summary and "nobody healthy is evicted" in summary
    trace = tmp_path / "trace.txt"
    again = said_as_json("simulate", *bug, "--schedule", found, "--trace", trace, status=1)
    assert again["outcomes"][0]["trace"] == outcome["trace"]
    assert trace.read_text().count("\n") > 10
    assert said("simulate", "--schedule", found).exit_code == 0


@pytest.mark.parametrize("scenario", ["swarm", "crash"])
@pytest.mark.parametrize("most", [16, pytest.param(MOST_WITH_STEPS, marks=pytest.mark.thorough)])
def test_jobs_of_more_than_the_most_ranks_with_steps_have_none(
    most: int, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("draw", "show"):
        monkeypatch.setattr(f"holdfast.harness.simulate.{module}.MOST_WITH_STEPS", most)
    below, above = (said_as_json("simulate", "--ranks", str(n), "--scenario", scenario) for n in (most, most + 1))
    assert below["schedule"]["layout"]["ranks"] == most and below["outcomes"][0]["steps"] > 0
    assert [run["ranks"] for run in (above if scenario == "swarm" else [above])] == [most + 1]


def test_a_swarm_has_the_ranks_that_it_is_asked_for() -> None:
    """Every seed of it, small or large; a large one loses members, and has no steps."""
    assert {draw(seed, 16).layout.ranks for seed in range(50)} == {16}
    large = [draw(seed, 1000, 125) for seed in range(50)]
    assert all(each.layout.steps == 0 and each.faults for each in large)
    assert {type(fault).__name__ for each in large for fault in each.faults} == {
        "KillProcess", "PauseProcess", "KillHost", "KillRack", "PartitionHosts", "BlockRegister"
    }  # fmt: skip


# -- simulate --compare: times are read off event logs, errors are stated, and real processes come near


COSTS = compare.MachineCosts(
    ranks=4,
    backend="shm",
    cores=2,
    link=5e-5,
    spread=0.5,
    message=2e-4,
    further=2e-5,
    read=2e-5,
    write=3e-5,
    connect=1e-3,
    op=3e-4,
    gone=1e-3,
)


def test_an_error_is_a_share_of_what_was_measured_and_stands_in_the_table_beside_it() -> None:
    assert [compare.error_of(0.9, 1.0), compare.error_of(1.1, 1.0)] == pytest.approx([0.1, 0.1])
    moments = [compare.RecoveryMoments(1, 5), compare.RecoveryMoments(3, 4), compare.RecoveryMoments(2, 9)]
    assert compare.middle(moments) == compare.RecoveryMoments(2, 5)
    predicted, measured = compare.RecoveryMoments(0.006, 0.011), compare.RecoveryMoments(0.005, 0.01)
    case = compare.Comparison("kill", 4, 1, "shm", predicted, measured, (measured,))
    out = console()
    with out.capture() as printed:
        out.print(compare.cases_table([case]), width=200)
    for text in ("kill", "4 over shm", "6 ms", "5 ms", "20%", "11 ms", "10 ms", "10%"):
        assert text in printed.get()


def test_costs_are_times_of_the_simulated_protocol() -> None:
    """A slower machine is slower to install a view and to commit; a stop is noticed after the suspect time."""
    usual = compare.predict("kill", 4, COSTS, seed=0)
    slower = compare.predict("kill", 4, replace(COSTS, message=2e-3, connect=0.1), seed=0)
    assert 0 < usual.view < usual.commit < 0.1
    assert usual.view < slower.view
    assert slower.commit - slower.view > 0.075  # three survivors share the connecting of four on as many cores
    assert 0.3 < compare.predict("stop", 4, COSTS, seed=0).view < 0.7
    assert 0.3 < compare.predict("host", 4, COSTS, seed=0).view < 0.7


def test_few_ranks_are_compared_without_the_loss_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = compare.RecoveryMoments(0.005, 0.01)
    monkeypatch.setattr(compare, "SEEDS", 1)
    monkeypatch.setattr(compare.netns, "missing", lambda: None)
    monkeypatch.setattr(compare, "measure_costs", lambda ranks, backend, progress: COSTS)
    monkeypatch.setattr(compare, "measure_recovery", lambda fault, ranks, backend, seed: measured)
    result = compare.compare((2,), repeats=1)
    assert [case.fault for case in result.cases] == ["kill", "stop"]
    assert result.left_out == ("the loss of a host with 2 ranks: it is one of 4, with a rank each",)


@pytest.mark.thorough  # it starts a job of four processes for each fault, and measures the machine first
def test_the_command_compares_with_real_processes() -> None:
    result = said_as_json("simulate", "--compare", "--ranks", "4", "--repeats", "1")
    planned = [case["fault"] for case in result["cases"]]
    assert planned[:2] == ["kill", "stop"]
    assert "host" in planned or "loss of a host" in result["left_out"][0]
    assert all(0 < case["measured"]["view"] <= case["measured"]["commit"] for case in result["cases"])
    assert result["median_error"] < 1.0
