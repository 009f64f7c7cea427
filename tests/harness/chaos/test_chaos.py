"""Chaos on real processes: runs that hold, a run that does not, what they leave behind, and chaos under pytest."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import re
import select
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from holdfast.comms.errors import HoldfastError, PeerFailed
from holdfast.comms.reproducible import sum_contributions
from holdfast.comms.transport.liveness import this_process
from holdfast.ft import Session
from holdfast.ft.event_lines import read_events, refuse
from holdfast.ft.events import FaultInjected
from holdfast.ft.faultpoints import Arrival, GateAddress, GateAgent, PointFilter
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.flight.recorder import FlightRecorder
from holdfast.harness import chaos as chaos_module
from holdfast.harness.chaos.outcome import checks
from holdfast.harness.chaos.outcome.measure import injected_faults, percentiles
from holdfast.harness.chaos.outcome.record import ChaosReport, ChaosRun, Speed, compared, load_report
from holdfast.harness.chaos.outcome.show import figures_of, write_report
from holdfast.harness.chaos.run import store_processes as store
from holdfast.harness.chaos.run.process_set import recorded_ops
from holdfast.harness.chaos.run.scenario_run import LATE_STEPS, RawRun, RunFault, ScenarioRun, fits
from holdfast.harness.chaos.run.session_processes import Notes, digest_of, report_state
from holdfast.harness.chaos.run.store_processes import BODIES
from holdfast.harness.chaos.scenario import Planned, Scenario, Trigger, find_scenario, scenario_names
from holdfast.harness.chaos.workload import AllReduce, StoreWorkload
from holdfast.harness.invariants import Bounds, CheckResult, Deadlines, Event, examine
from holdfast.harness.links.policy import LinkTraffic
from holdfast.harness.report.model import RecoveryStage
from support.browser import dom, needs_chromium, pictures
from support.event_records import an_event
from support.programs.forked_programs import said

KILL = """
title = "a rank is killed"
[workload]
kind = "all_reduce"
steps = 60
elements = 256
[job]
ranks = 2
spares = 1
[[fault]]
type = "kill"
who = 1
at = { point = "commit.before_barrier", in_step = 20, rank = 1 }
[expect]
ranks = 2
rebuilds = [1, 1]
"""


PLAIN = Scenario(name="plain", title="", summary="", workload=AllReduce())


def failures_of(raw: RawRun) -> list[str]:
    """What is not as expected in a run of nine steps."""
    return checks.failures(PLAIN, raw, [], injected_faults(raw), Speed(steps=9, rate=1.0), None, 0)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report on two runs: one kills at a point of the protocol, one expects the impossible."""
    folder = tmp_path_factory.mktemp("chaos")
    (folder / "kill.toml").write_text(KILL)
    (folder / "too-much.toml").write_text(KILL.replace("ranks = 2\nrebuilds", "ranks = 5\nrebuilds"))
    done = said(
        "chaos", "run", str(folder / "kill.toml"), str(folder / "too-much.toml"), "--report", str(folder), "--json"
    )
    (folder / "stdout").write_text(done.stdout)
    assert done.exit_code == 1, done.output
    return folder


def test_a_kill_between_prepare_and_commit_loses_nothing(killed: Path) -> None:
    held, _ = load_report(killed).runs
    assert held.passed, held.failures
    assert (held.speed.steps, held.ranks, held.rebuilds) == (60, 2, 1)
    assert held.digest == held.reference_digest != ""
    (fault,) = held.strikes
    assert fault.step == 20
    assert [stage.name for stage in fault.stages] == ["detected", "rebuilt", "resumed"]
    assert [stage.seconds for stage in fault.stages] == sorted(stage.seconds for stage in fault.stages)
    looked = {finding.invariant: finding.looked for finding in held.findings}
    assert looked["every sample once"] == 60
    assert looked["one membership an epoch"] > 0
    assert looked["ops end by their deadline"] > 60 * 2 * 3, "each attempt of a rank, and the ops in it"


def test_json_has_every_figure_and_no_pictures_and_why_a_run_is_not_as_expected(killed: Path) -> None:
    told = json.loads((killed / "stdout").read_text())
    assert told["passed"] is False
    first, failed = told["runs"]
    assert failed["failures"] == ["the job ended with 2 ranks, expected are 5"]
    assert failed["repeat"] == f"holdfast chaos run {killed / 'too-much.toml'} --seed 0"
    assert first["percentiles"]["resumed"]["count"] == 1
    assert first["goodput"] > 0, "a share of the speed of a run without faults, which a busy machine may halve"
    assert "spans" not in first


# -- a run that does not


def test_a_store_process_that_ends_without_a_fault_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed, read = tmp_path / "crashed", BODIES["reader"]

    def reader(*args: Any) -> dict[str, Any]:
        if not crashed.exists():
            crashed.touch()
            raise RuntimeError("a bug in the reader")
        return read(*args)

    monkeypatch.setitem(BODIES, "reader", reader)
    small = StoreWorkload(versions=2, readers=1, megabytes=0.01)
    (failure,) = chaos_module.run_scenario(msgspec.structs.replace(PLAIN, workload=small), compare=False).failures
    assert failure == "reader-0 exited with status 1, and nobody had struck it"


@pytest.mark.parametrize(("again", "came"), [(True, True), (True, False), (False, True)])
def test_a_run_may_end_before_a_recurring_fault_comes_again(again: bool, came: bool) -> None:
    raw = history()
    raw.faults = [RunFault(msgspec.structs.replace(each.planned, again=again)) for each in raw.faults]
    raw.faults[0].time = 1.0 if came else None
    told = any("never struck: its moment (5.00 s)" in each for each in failures_of(raw))
    assert told == (not again or not came)


def test_a_fault_waits_at_the_end_of_a_job_only_if_its_step_was_committed() -> None:
    ends = [Arrival(1, "finish.before_propose", steps, 1, 1) for steps in (9, 10, 11)]
    assert [fits(each, Trigger(step=9)) for each in ends] == [False, True, True]
    assert not any(fits(each, Trigger(step=1000)) for each in ends)


def test_the_events_of_a_process_are_written_before_it_may_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a gate, before the harness hears of it.

    Those of a store, before a reader can fetch the version; those of a rank, before the others can commit its part.
    """
    address, told = GateAddress(str(tmp_path / "gate"), (PointFilter("step.begin"),)), list[str]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gate:
        gate.bind(address.path)
        gate.listen()
        agent = GateAgent(
            address, lambda: told.append("written" if not select.select([line], [], [], 0)[0] else "late")
        )
        with gate.accept()[0] as line:
            line.send(b"1")  # it may go on
            agent.reach("step.begin", 1, 0, 1)
            assert told == ["written"] and line.recv(1000)
        agent._line.close()

    made: dict[str, Any] = {}
    monkeypatch.setattr(store, "WeightStore", lambda url, **options: made.update(options))
    monkeypatch.setenv("HOLDFAST_REGISTER", "memory://x")
    log = EventLog("p", tmp_path)
    store._opened(StoreWorkload(), log, hold=False)
    made["observe"]("copied", {"version": 1})
    assert [event.kind for event in read_events(tmp_path / "p.jsonl", refuse)] == ["published"]
    log.close()

    monkeypatch.setenv("HOLDFAST_LOG_DIR", str(tmp_path))
    session, attempt = SimpleNamespace(identity="rank"), SimpleNamespace(step=1, epoch=1, shards=(0,), total_shards=2)
    with Notes(session) as notes:  # type: ignore[arg-type]
        notes.samples(attempt)  # type: ignore[arg-type]
        (taken,) = read_events(tmp_path / "rank.jsonl", refuse)
        assert (taken.kind, taken.of) == ("samples", 2)


def link_faults(**traffic: int) -> list[str]:
    """What is not as expected in a run with `lossy` and a cut that did not end; `traffic` was counted."""
    raw = RawRun(0.0, traffic=(LinkTraffic(source="1", target="2", plane="data", connections=1, bytes=9, **traffic),))
    fault = chaos_module.fault
    made = (fault("lossy", share=0.1, step=1).what, fault("cut", source=1, lasts=50.0, step=1).what)
    raw.faults = [
        RunFault(Planned(number=number, type="", when=Trigger(step=1), what=what), time=1.0)
        for number, what in enumerate(made, start=1)
    ]
    raw.too_long = True
    return failures_of(raw)


def test_a_fault_of_links_that_changed_nothing_and_a_cut_that_stalled_a_run_are_named() -> None:
    named = "fault 1 (lossy link: all ↔ all) changed nothing: the proxy counted nothing as lost"
    idle = "fault 2 (link cut: rank 1 ↔ all) changed nothing: the proxy counted nothing as held"
    assert {named, idle} <= set(link_faults())
    found = link_faults(lost=3, held=2)
    assert not {named, idle} & set(found)
    (stalled,) = (each for each in found if each.startswith("fault 2"))
    assert "it is not evicted, and the job waits for it" in stalled
    assert 'job.hosts = "many"' in stalled


def test_a_fault_that_cannot_be_undone_is_not_taken_for_healed_and_fails_the_run(tmp_path: Path) -> None:
    away = chaos_module.fault("register-away", lasts=1.0, step=1).what
    planned = Planned(number=1, type="register-away", when=Trigger(step=1), what=away, lasts=1.0)

    def fails() -> None:
        raise HoldfastError("the nodes of the register do not start")

    for name, undo in (("heals", lambda: None), ("fails", fails)):
        run = ScenarioRun(PLAIN, [planned], tmp_path)
        (fault,) = run._raw.faults
        fault.time, fault.undo, run._log = 0.0, undo, EventLog(name, tmp_path)
        run._mend(2.0)
        run._log.close()
        told = f"fault 1 ({away.words()}) could not be undone: the nodes of the register do not start"
        assert (told in failures_of(run._raw)) == (fault.healed is None) == (name == "fails")
    assert [event.process for event in read_events(tmp_path, refuse) if event.kind == "healed"] == ["heals"]


def test_show_prints_the_file_and_the_schedule_of_a_seed() -> None:
    shown = said("chaos", "show", "kill-rank", "--seed", "3")
    assert shown.exit_code == 0
    assert 'type = "kill"' in shown.stdout
    assert "# With --seed 3:\n#   1. step " in shown.stdout
    assert find_scenario("kill-rank").title in shown.stdout


def test_the_page_is_self_contained_and_has_all_pictures(killed: Path) -> None:
    page = (killed / "report.html").read_text()
    assert "prefers-color-scheme: dark" in page
    assert len(pictures(page)) == 2 * 4, "progress, timeline, percentiles and one recovery for each of two runs"
    for words in ("✓ held", "✗ not as expected", "equal bits", "every sample once", "Repeat it", "2 scenarios"):
        assert words in page


# -- two runs side by side


def test_two_runs_are_compared_side_by_side_each_figure_as_better_or_worse(killed: Path, tmp_path: Path) -> None:
    done = said("chaos", "compare", killed, killed, "--report", tmp_path)
    assert done.exit_code == 0, done.output
    assert "steps a second" in done.stdout
    assert (tmp_path / "compare.html").stat().st_size > 5000
    report = load_report(killed)
    assert all(row.direction in ("equal", "") for row in compared(report.runs[0], report.runs[0]))
    assert [compared(*runs)[0].direction for runs in (report.runs, report.runs[::-1])] == ["worse", "better"]
    run = report.runs[0]
    resumed = msgspec.structs.replace(run.percentiles["resumed"], p50=run.percentiles["resumed"].p50 / 2)
    other = msgspec.structs.replace(
        run, speed=Speed(steps=run.speed.steps, rate=2 * run.speed.rate), percentiles={"resumed": resumed}
    )
    for before, after, direction in ((run, other, "better"), (other, run, "worse")):
        directions = {row.name: row.direction for row in compared(before, after)}
        assert directions["steps a second"] == directions["resumed median"] == direction, "more steps, sooner again"


CUT = """<script>
for (const each of document.querySelectorAll(".chart, .scroll, pre, main"))
  if (each.scrollWidth > each.clientWidth + 1) document.title += " CUT " + each.className + each.tagName;
</script>"""


@pytest.mark.thorough
@needs_chromium
def test_no_content_of_the_pages_is_wider_than_its_container(killed: Path, tmp_path: Path) -> None:
    assert said("chaos", "compare", killed, killed, "--report", tmp_path).exit_code == 0
    for page in (killed / "report.html", tmp_path / "compare.html"):
        looked = tmp_path / f"looked-{page.name}"
        looked.write_text(page.read_text() + CUT)
        for width in (1280, 800):
            shown = dom(looked.as_uri(), tmp_path, f"--window-size={width},1200")
            assert "<title>" in shown
            assert " CUT " not in shown.partition("<title>")[2].partition("</title>")[0]


def page_of(run: ChaosRun, folder: Path) -> str:
    write_report(ChaosReport.of(run), folder / "report.html")
    return (folder / "report.html").read_text()


def test_what_was_not_checked_is_never_shown_as_held(killed: Path, tmp_path: Path) -> None:
    run, _ = load_report(killed).runs
    idle = CheckResult("equal bits", "All who log a digest have the same.", 0, ())
    unchecked = msgspec.structs.replace(run, unchecked="the ranks returned nothing", findings=(*run.findings, idle))
    text = page_of(unchecked, tmp_path)
    assert "✓ held; results unchecked</span>" in text
    row = re.sub(r"\s+|<[^>]+>", " ", text[text.rindex("<b>equal bits</b>") :].partition("</tr>")[0])
    assert "not checked" in row and " 0 " not in row
    shown = [figure for figure in figures_of(unchecked) if figure.label == "Final state"]
    assert [(figure.value, figure.note, figure.tone) for figure in shown] == [
        ("not checked", "the ranks returned nothing", "plain")
    ]


def test_a_few_recoveries_are_shown_each_and_percentiles_are_those_of_five_or_more(
    killed: Path, tmp_path: Path
) -> None:
    run, _ = load_report(killed).runs
    fault = run.strikes[0]
    resumed = [
        msgspec.structs.replace(fault, stages=(RecoveryStage("detected", 0.001), RecoveryStage("resumed", seconds)))
        for seconds in (0.1, 0.2, 0.4, 0.8, 1.6)
    ]
    for count, columns in ((2, "each: 100 ms, 200 ms"), (5, "400 ms</td>")):
        few = msgspec.structs.replace(run, percentiles=percentiles(resumed[:count]))
        table = page_of(few, tmp_path).partition("<td>resumed</td>")[2].partition("</tr>")[0]
        assert columns in table
        assert ("each:" in table) == (count < 5)
    two, three, five = (percentiles(resumed[:count])["resumed"] for count in (2, 3, 5))
    assert (two.p50, two.p90, two.worst) == (pytest.approx(0.15), None, 0.2), "the mean of the middle pair"
    assert (three.p50, five.p50, five.p90) == (0.2, 0.4, 1.6)


def history(*lines: tuple[float, str, dict[str, Any]]) -> RawRun:
    """A run in which rank 1 was killed at 1 s and a spare at 5 s, with these events."""
    kill = chaos_module.kill(1, step=1).what
    faults = []
    for number, moment in enumerate((1.0, 5.0), start=1):
        planned = Planned(number=number, type="kill", when=Trigger(seconds=moment), what=kill)
        faults.append(
            RunFault(planned, time=moment, injected=(FaultInjected(time=moment, what="kill", number=number),))
        )
    return RawRun(0.0, events=[an_event(kind, time=at, **fields) for at, kind, fields in lines], faults=faults)


def test_every_stage_belongs_to_the_fault_that_led_to_it() -> None:
    raw = history(
        (1.001, "detected", {"members": ["b"]}),
        (1.002, "revoked", {"epoch": 1}),
        (1.003, "installed", {"epoch": 2, "members": ["a", "c"], "process": "a"}),
        (1.004, "installed", {"epoch": 2, "members": ["a", "c"], "process": "c"}),
        (1.010, "rebuilt", {"epoch": 2, "process": "c"}),
        (1.012, "rebuilt", {"epoch": 2, "process": "a"}),
        (1.020, "committed", {"step": 7, "process": "c"}),
        (1.030, "committed", {"step": 7, "process": "a"}),
        (5.001, "detected", {"members": ["spare"]}),
        (5.004, "committed", {"step": 99}),
        (9.0, "rebuilt", {"epoch": 3}),
        (60.0, "rebuilt", {"epoch": 2}),  # a resumed driver's trainers count their epochs from the beginning
        (9.1, "committed", {"step": 200}),
    )
    first, second = injected_faults(raw)
    assert [(stage.name, round(stage.seconds, 6)) for stage in first.stages] == [
        ("detected", 0.001),
        ("rebuilt", 0.012),
        ("resumed", 0.02),
    ]
    assert [stage.name for stage in second.stages] == ["detected", "resumed"], "a spare's death ends no epoch"
    assert second.stages[1].seconds == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def train(session):\n    raise ValueError('no luck')\n", ["ValueError: no luck", "train.py:2"]),
        ("import no_such_module\n", ["No module named 'no_such_module'"]),
        ("def train(:\n", ["SyntaxError"]),
        ("def other(session): pass\n", ["has no attribute 'train'"]),
    ],
    ids=["raises", "import", "syntax", "name"],
)
def test_a_workload_that_fails_without_a_fault_is_reported_in_a_line(
    source: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(source)
    scenario = tmp_path / "mine.toml"
    scenario.write_text(
        'title = "[mine]"\nlimit = 20.0\n[workload]\nkind = "python"\ntarget = "train.py:train"\n[job]\nranks = 1\n'
    )
    done = said("chaos", "run", scenario, "--report", tmp_path / "report")
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert all(each in done.stderr.splitlines()[-1] for each in words), done.stderr
    assert "[mine]" in done.stdout


# -- the checkers of workloads


def test_an_op_that_has_not_ended_is_late_if_its_process_lives_or_left_in_it(tmp_path: Path) -> None:
    me, minute = this_process(), 60.0

    def entered(name: str, pid: int) -> FlightRecorder:
        then = iter([0.0, time.monotonic() - minute]).__next__  # when the recording was made, and the op began
        process = (me.host, pid, me.started)
        recorder = FlightRecorder(tmp_path / f"{name}.flight", name, "job", now=then, process=process)
        recorder.journal("default", 1, 0, 2, "shm").enter("barrier", 1, 0, None, None, -1)
        return recorder

    entered("lives", me.pid)
    entered("was-killed", 2**30)
    for name, seconds in (("left-late", minute), ("left-soon", 1.0)):
        recorder = entered(name, 2**30)
        recorder._now = lambda seconds=seconds: time.monotonic() - minute + seconds  # type: ignore[misc]
        recorder.close("interrupted")
    ops = recorded_ops(tmp_path)
    assert {each.process for each in ops} == {"lives", "left-late", "left-soon"}
    (found,) = examine(ops, kinds=(Deadlines,))
    late = found.violations
    assert sorted(each.process for each in late) == ["left-late", "lives"]
    assert all("barrier has not ended after 60" in each.message for each in late)
    struck = an_event("fault", "harness", what="kill", target="lives")
    (found,) = examine([struck, *ops], kinds=(Deadlines,))
    assert [each.process for each in found.violations] == ["left-late"]


def test_a_shard_without_a_worker_or_with_two_is_found() -> None:
    """Also one that no rank ever works on, where it is known how many there are."""
    twice = "step 2 was committed with shards worked on twice: [0, 1, 1]"
    lacks = "step {} was committed without shards {}".format
    for known, messages in (
        ({}, [lacks(1, [1]), twice]),
        ({"of": 3}, [lacks(0, [2]), lacks(1, [1, 2]), lacks(2, [2]), twice]),
    ):
        checker = checks.EverySampleOnce(Bounds())
        for step, (mine, yours) in enumerate([([0], [1]), ([0], []), ([0, 1], [1])]):
            checker.observe(an_event("samples", "a", step=step, epoch=1, shards=mine, **known))
            checker.observe(an_event("samples", "b", step=step, epoch=1, shards=yours, **known))
            checker.observe(an_event("committed", "a", step=step, epoch=1))
        checker.finish()
        assert [violation.message for violation in checker.violations] == messages


def test_an_eviction_without_a_fault_is_found() -> None:
    checker = checks.OnlyFaultyMembersLeave(Bounds())
    checker.observe(an_event("installed", epoch=1, members=["a", "b", "c"]))
    checker.observe(an_event("fault", what="kill", target="b"))
    checker.observe(an_event("installed", epoch=2, members=["a", "c"]))
    checker.observe(an_event("installed", epoch=3, members=["a"]))
    assert [violation.message for violation in checker.violations] == [
        "epoch 3 is without c, which no fault has struck"
    ]


def after_rebuilds(descriptors: list[int]) -> list[Event]:
    events = [an_event("rebuilt", epoch=1)]
    for number, count in enumerate(descriptors):
        events.append(an_event("rebuilt", epoch=2 + number))
        events.append(an_event("resources", descriptors=count, threads=5, resident=0))
    return events


def test_descriptors_that_grow_with_rebuilds_are_found_and_not_those_of_members_that_come_and_go() -> None:
    (violation,) = checks.growth(after_rebuilds([30, 40, 50, 60, 70, 80, 90])).violations
    assert "descriptors grew from 40 to 80 over 8 rebuilds" in violation.message

    finding = checks.growth(after_rebuilds([30, 62, 48, 62, 48, 62, 62]))
    assert finding.looked
    assert not finding.violations


@pytest.mark.parametrize(
    ("digests", "reference", "invariant", "compared", "differ"),
    [
        ({"rank 0": "a", "rank 1": "b"}, "", "same result on all ranks", 2, ["rank 1"]),
        ({"rank 0": "a", "rank 1": "a"}, "", "same result on all ranks", 2, []),
        ({"rank 0": "a"}, "", "same result on all ranks", 0, []),
        ({}, "", "same result on all ranks", 0, []),
        ({"rank 0": "a", "rank 1": "b"}, "a", "same weights as without faults", 2, ["rank 1"]),
    ],
)
def test_results_are_compared_with_those_without_faults_else_with_each_other(
    digests: dict[str, str], reference: str, invariant: str, compared: int, differ: list[str]
) -> None:
    finding = checks.same_weights(digests, reference)
    assert (finding.invariant, finding.looked) == (invariant, compared)
    assert [violation.process for violation in finding.violations] == differ


class Color(enum.Enum):
    RED, BLUE = 1, 2


@dataclasses.dataclass
class Outcome:
    weights: object


class Row(msgspec.Struct):
    weights: object


class Opaque:
    """A value whose text has its address in it, and not its state."""


LONG = np.arange(10_000.0)  # of which numpy and torch write the ends alone
CHANGED = np.where(LONG == 5_000, -7.0, LONG)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LONG, CHANGED),
        (LONG, LONG.reshape(100, 100)),
        (np.zeros(2, "f4"), np.zeros(2, "i4")),
        (np.float32(1), np.float64(1)),
        (torch.from_numpy(LONG), torch.from_numpy(CHANGED)),
        (torch.zeros(2), -torch.zeros(2)),
        (Outcome(torch.from_numpy(LONG)), Outcome(torch.from_numpy(CHANGED))),
        (Row(LONG), Row(CHANGED)),
        (Row(1), Outcome(1)),
        ({"a": LONG}, {"a": CHANGED}),
        ([[1], 2], [[1, 2]]),
        ({1: "a"}, {"1": "a"}),
        ({"a", "b"}, {"a", "c"}),
        ({}, []),
        (["a", "b"], ["a,b"]),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", b"1"),
        (10**5_000, 10**5_000 + 1),
        (Color.RED, Color.BLUE),
        (torch.float16, torch.bfloat16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_results_that_differ_anywhere_have_different_digests(one: object, other: object) -> None:
    assert digest_of(one) == digest_of(copy.deepcopy(one))
    assert digest_of(one) != digest_of(other)


def test_a_digest_depends_neither_on_the_order_of_a_mapping_or_set_nor_on_where_a_tensor_lies() -> None:
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of(set(map(str, range(100)))) == digest_of(set(map(str, reversed(range(100)))))
    assert digest_of(torch.arange(6).view(2, 3).T) == digest_of(torch.arange(6).view(2, 3).T.contiguous())
    assert digest_of(LONG[::2]) == digest_of(LONG[::2].copy())
    model = torch.nn.Linear(2, 2)
    assert digest_of(model) == digest_of(dict(model.state_dict()))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Opaque(), "Opaque"),
        ({"model": [Opaque]}, "type"),
        (np.array([Opaque()]), "object"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "Tensor"),
    ],
)
def test_a_result_of_which_no_digest_can_be_taken_is_refused_by_its_type(value: object, named: str) -> None:
    """Its text would be compared, which differs between ranks for equal states, or the other way round."""
    with pytest.raises(TypeError, match=named) as caught:
        digest_of(value)
    assert "return, or report, tensors, numpy arrays" in str(caught.value)


# -- under pytest


def train(session: Session, steps: int, attach: bool = True) -> torch.Tensor:
    """A user's training, with a library that raises a RuntimeError when an op fails, as torch does in callbacks.

    Without `attach` it has a bug: a newcomer begins with another state than the others have.
    """
    weights = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(weights.weight)
    if attach:
        session.attach("weights", weights)
    for attempt in session.steps(steps):
        with attempt:
            parts = [torch.sin(weights.weight.detach() * (shard + attempt.step)) for shard in attempt.shards]
            total = torch.empty(1, 4)
            try:
                sum_contributions(attempt.comm, parts, total)
            except PeerFailed as error:
                raise RuntimeError(f"Got the following error when running the callback: {error}") from None
        if attempt.committed:
            with torch.no_grad():
                weights.weight -= 0.01 * total
    return weights.weight.detach()


def test_a_users_training_survives_kills_and_a_fast_job_waits_for_them(
    chaos: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no invariant is broken. A spare takes the place of the first that dies; two go on without the second."""
    # without the wait the job would be over between two looks
    monkeypatch.setattr("holdfast.harness.chaos.run.scenario_run.LOOK_SECONDS", 0.5)
    kills = (chaos.kill(1, step=10), chaos.kill(1, point="commit.before_prepare", in_step=20), chaos.kill(0, step=37))
    patient = {"suspect": 8.0}  # a busy machine makes no rank suspect; a killed one is known by its process
    run = chaos.run(train, 40, ranks=3, spares=1, faults=kills, timeouts=patient).check()
    looked = {finding.invariant: finding.looked for finding in run.report.findings}
    assert looked["one membership an epoch"] >= 3 + 3 + 2
    assert looked["committed steps are kept"] >= 2 * 40
    assert looked["no effect of a revoked epoch"] >= 2 * 2 * 40
    assert run.values and all(torch.equal(each, run.values[0]) for each in run.values)
    first, _, last = run.report.strikes
    assert 10 < first.step <= 10 + LATE_STEPS
    assert 37 < last.step <= 40


def test_a_bug_in_a_users_training_is_found(chaos: Any, tmp_path: Path) -> None:
    faults = [chaos.kill(0, point="step.begin", in_step=9, rank=0)]
    with pytest.raises(chaos_module.ChaosFailed, match="same weights as without faults") as caught:
        chaos.run(train, 20, False, ranks=2, spares=1, faults=faults).check()
    assert (
        "repeat: pytest 'tests/harness/chaos/test_chaos.py::test_a_bug_in_a_users_training_is_found' --chaos-seed 0"
        in str(caught.value)
    )
    assert (tmp_path / "chaos" / "report.html").exists()


def diverge(session: Session, steps: int, result: Any = None) -> Any:
    """Training that ends differently on each rank, unless with a given result, and reports nothing in 0 steps."""
    for attempt in session.steps(steps):
        with attempt:
            attempt.comm.all_reduce(torch.ones(1))
        if attempt.committed:
            report_state(session, attempt.step, {"rank": attempt.comm.rank})
    return result or float(session.rank or 0) if steps else None


def test_faults_whose_moment_never_came_and_ranks_that_diverge_unless_unchecked_fail_the_run(chaos: Any) -> None:
    late = [chaos.kill(1, step=1000), chaos.kill(1, step=3), chaos.kill(0, seconds=500.0)]
    any_bits = chaos.run(diverge, 3, ranks=2, faults=late, expect={"weights": "any"}, compare=False)
    *others, first, second, third = any_bits.failures
    assert first == "fault 1 (SIGKILL: rank 1) never struck: its moment (step 1000) did not come"
    assert "fault 2" in second and "its moment (step 3)" in second and "its moment (500.00 s)" in third
    assert {each.partition(":")[0] for each in others} == {"same result on all ranks", "equal bits"}
    assert "step 0 has digest" in next(each for each in others if each.startswith("equal bits"))
    assert any_bits.report.rebuilds == 0
    unchecked = chaos.run(diverge, 1, Opaque(), ranks=2, expect={"weights": "unchecked"}, compare=False)
    assert unchecked.report.unchecked == 'expect.weights = "unchecked"'
    assert not any(each.startswith("same result") for each in unchecked.failures)


LIBRARY = [name for name in scenario_names() if find_scenario(name).minutes is None]
RUN_ELSEWHERE = {"rl-demo", "rl-host-lost"}
"""By `make demo`, and with both backends in `test_chaos_training`."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in LIBRARY if name not in RUN_ELSEWHERE])
def test_each_scenario_of_the_library_passes(name: str) -> None:
    chaos_module.run_scenario(find_scenario(name)).check()
