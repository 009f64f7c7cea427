"""`holdfast bench`: definitions, the check of results, runs on tiny sizes, the page, and when processes recovered."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import psutil
import pytest
from rich.console import Console

from holdfast.ft import Timeouts
from holdfast.ft.console.console import console
from holdfast.ft.console.units import format_bytes
from holdfast.ft.events import Event
from holdfast.ft.launch.held_directory import MARKER
from holdfast.harness.bench import recovery, report
from holdfast.harness.bench import run as rounds
from holdfast.harness.bench.command import RecoveryPlan
from holdfast.harness.bench.contestants import ContestantGroup, missing
from holdfast.harness.bench.data import POISON, Array, allocate, count_wrong, fill, pattern
from holdfast.harness.bench.drivers import BoundOp
from holdfast.harness.bench.operations import OPERATIONS, Operation, parse_counts, parse_size, parse_sizes
from holdfast.harness.bench.ranks import Bound, Measure, Measurement, time_ops
from holdfast.harness.bench.recovery import timing_of
from holdfast.harness.bench.report import Bench, BenchRow, OpFailure, ratios
from holdfast.harness.measure import results
from holdfast.harness.measure.results import Machine, Noise
from holdfast.harness.measure.stats import Timing
from holdfast.harness.measure.worker import WorkerBarrier
from holdfast.harness.recovery import NotRecovered, recovery_of, wait_for_recovery
from holdfast.harness.report import charts
from holdfast.harness.simulate.compare import RecoveryMoments, moments_of
from support.browser import pictures
from support.event_records import an_event
from support.programs.forked_programs import said_as_json
from support.waiting import next_line


def summing(ranks: int) -> Any:
    """A rank that sums with other ranks, all of which have its own input."""

    def bind(operation: Operation, source: Array, target: Array) -> BoundOp:
        return BoundOp(lambda: np.multiply(target, ranks, out=target))

    return SimpleNamespace(rank=0, ranks=ranks, detail="", bind=bind)


COPY = Measure("copy", 100, "float32", 0, 3, 0, 1)
COLLECTIVES = tuple(name for name in OPERATIONS if name != "copy")


# Definitions: those of nccl-tests --------------------------------------------------------------------------------


def test_bus_bandwidth_factors_are_those_of_the_ops() -> None:
    shares = {"all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75}
    factors = {**shares, "broadcast": 1.0, "send_recv": 1.0}
    assert {op: OPERATIONS[op].bus_factor(4) for op in factors} == factors
    assert OPERATIONS["all_reduce"].bus_factor(2) == 1.0


def test_size_counts_the_larger_buffer_of_a_rank_which_has_one_element_at_least() -> None:
    gather = OPERATIONS["all_gather"]
    assert gather.block(1024, 4, ranks=4) == 64
    assert gather.lengths(64, ranks=4) == (64, 256)
    assert gather.nbytes(64, 4, ranks=4) == 1024
    assert gather.block(8, 4, ranks=4) == 1
    assert gather.nbytes(1, 4, ranks=4) == 16


def test_sizes_are_lists_and_ranges() -> None:
    assert parse_size("64K") == 65536
    assert parse_size("1MiB") == 1 << 20
    assert parse_sizes("4K,8,8") == (8, 4096)
    assert parse_sizes("8:1K") == (8, 64, 512, 1024)
    assert parse_sizes("8:64:2") == (8, 16, 32, 64)
    assert parse_counts("2,4,2") == (2, 4)
    assert parse_counts("2:8") == (2, 4, 8)
    assert parse_counts("1,3:7") == (1, 3, 6, 7)
    assert [format_bytes(n) for n in (8, 1536, 64 << 20)] == ["8 B", "1.5 KiB", "64 MiB"]


@pytest.mark.parametrize("text", ["", "0", "8Q", "64:8", "8:64:1", "8:64:2:3", "-8"])
def test_a_malformed_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|empty"):
        parse_sizes(text)


@pytest.mark.parametrize("op", [name for name, operation in OPERATIONS.items() if operation.layout != "none"])
@pytest.mark.parametrize("block", [1, 7, 20_000])
def test_the_check_looks_at_every_element_and_takes_no_untouched_output_for_a_result(op: str, block: int) -> None:
    """That it takes a right one is seen where ops run."""
    operation, ranks = OPERATIONS[op], 4
    lengths = operation.lengths(block, ranks)
    for rank in range(1 if op in ("reduce", "gather") else ranks):  # the result of those only rank 0 has
        source = allocate(lengths[0], "float32")
        target = source if operation.layout in ("in_place", "counter") else allocate(lengths[1], "float32")
        fill(operation, rank, 4, source, target)
        if op != "copy" and (op not in ("broadcast", "broadcast_object") or rank != 0):
            assert count_wrong(operation, rank, ranks, block, 4, target) > 0
        target[:] = POISON
        assert count_wrong(operation, rank, ranks, block, 4, target) == len(target)


def test_swapped_blocks_are_counted_as_wrong() -> None:
    operation, block = OPERATIONS["all_gather"], 4096
    target = np.concatenate([np.resize(pattern(rank, 0, "int64"), block) for rank in (1, 0)])
    assert count_wrong(operation, 0, 2, block, 0, target) > block


# Statistics ------------------------------------------------------------------------------------------------------


def test_a_timing_is_microseconds_an_op_of_the_slowest_rank() -> None:
    timing = Timing.of([0.001, 0.002, 0.003], block=10)
    assert (timing.p50, timing.min) == pytest.approx((200.0, 100.0))
    assert (timing.samples, timing.block) == (3, 10)
    answers = [Measurement([(0, 1000), (0, 5000)], [], 0), Measurement([(0, 3000), (0, 2000)], [], 0)]
    assert rounds._slowest(answers, blocks=False) == pytest.approx([3e-6, 5e-6])


def test_a_barrier_that_lets_a_rank_out_early_is_wrong() -> None:
    good = [Measurement([(0, 10)], [], 0), Measurement([(5, 11)], [], 0)]
    bad = [Measurement([(0, 4)], [], 0), Measurement([(5, 11)], [], 0)]
    assert (rounds._early(good), rounds._early(bad)) == (0, 1)


# Whole runs ------------------------------------------------------------------------------------------------------


def _plan(
    ops: tuple[str, ...], everyone: tuple[str, ...], ranks: int = 2, sizes: str = "8,1K", turns: int = 2
) -> rounds.BenchPlan:
    ours = tuple(name for name in everyone if name.startswith("holdfast:"))
    return rounds.BenchPlan(ops, everyone, ours, (ranks,), parse_sizes(sizes), rounds=turns, seconds=0.02)


def _refused(bench: Bench) -> set[tuple[str, str]]:
    """The ops that libraries do not have, as (library, op)."""
    assert not bench.failures
    assert all("not measured" in failure.reason for failure in bench.unmeasured), bench.unmeasured
    return {(failure.contestant, failure.op) for failure in bench.unmeasured}


def test_every_op_is_right_on_ours_and_on_gloo_in_the_same_run() -> None:
    bench = rounds.run(_plan(COLLECTIVES, ("holdfast:shm", "torch-gloo"), sizes="8,300K"))
    assert (bench.skipped, bench.wrong) == ({}, 0)
    assert {row.op for row in bench.rows if row.contestant == "holdfast:shm"} == set(COLLECTIVES)
    without = {name for name, op in OPERATIONS.items() if op.kind in ("object", "group", "window", "memory plane")}
    assert _refused(bench) == {("torch-gloo", name) for name in without | {"all_reduce_reproducible"}}
    assert {ratio.peer for ratio in bench.ratios} == {"torch-gloo"}
    assert all(row.timing.min <= row.timing.p50 <= row.timing.p99 for row in bench.rows)
    small, large = (next(row for row in bench.rows if row.nbytes == size) for size in (8, 300 * 1024))
    assert small.timing.block > 1, "small ops are timed in blocks"
    assert large.timing.block == 1, "large ops are timed one by one"


@pytest.mark.thorough
def test_fresh_inputs_are_written_before_each_op() -> None:
    operation = OPERATIONS["all_reduce"]
    bound = Bound(summing(2), operation, 64, "float32")
    bound.fill(1)
    given = bound.source.copy()
    run = bound.fresh()
    for _ in range(3):
        run()
    assert np.array_equal(bound.source, 2 * given), "twice what was written, not eight times"


@pytest.mark.thorough
def test_every_collective_is_right_on_fresh_inputs() -> None:
    ops = tuple(name for name, op in OPERATIONS.items() if op.kind in ("collective", "point to point"))
    plan = dataclasses.replace(_plan(ops, ("holdfast:shm", "torch-gloo"), sizes="8,300K"), fresh=True)
    bench = rounds.run(plan)
    assert (bench.wrong, bench.fresh) == (0, True)
    assert {row.op for row in bench.rows if row.contestant == "holdfast:shm"} == set(ops)


@pytest.mark.thorough
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_every_op_that_mpi_has_is_right_on_it(mpi: str) -> None:
    if (reason := missing(mpi)) is not None:
        pytest.skip(reason)
    bench = rounds.run(_plan(COLLECTIVES, (mpi,), sizes="65K", turns=1))
    assert (bench.skipped, bench.wrong) == ({}, 0)
    ours_alone = {"all_reduce_reproducible", "signal", "memory_read", "memory_write"}
    assert _refused(bench) == {(mpi, op) for op in ours_alone}
    assert {"openmpi": "Open MPI", "mpich": "MPICH"}[mpi] in bench.contestants[f"{mpi}, 2 ranks"]


def test_an_odd_number_of_ranks_which_are_threads_runs_every_op() -> None:
    bench = rounds.run(_plan(COLLECTIVES, ("holdfast:inproc",), ranks=3, sizes="64", turns=1))
    assert (bench.skipped, bench.failures, bench.wrong) == ({}, (), 0)


def test_what_cannot_run_or_be_measured_is_left_out_with_the_reason_and_memcpy_copies_as_many_bytes_as_an_op() -> None:
    ops, everyone = ("copy", "all_gather", "barrier"), ("holdfast:nosuch", "torch-gloo", "memcpy")
    bench = rounds.run(_plan(ops, everyone, sizes="8,16"))
    assert [*bench.skipped] == ["holdfast:nosuch"] and "nosuch" in bench.skipped["holdfast:nosuch"]
    assert (bench.failures, bench.wrong) == ((), 0)
    assert [(failure.op, failure.contestant) for failure in bench.unmeasured] == [("copy", "torch-gloo")] * 2
    measured = {name: [(row.op, row.nbytes) for row in bench.rows if row.contestant == name] for name in everyone}
    both = [("all_gather", 8), ("all_gather", 16), ("barrier", 0)]
    assert measured == {"holdfast:nosuch": [], "torch-gloo": both, "memcpy": [("copy", 8), ("copy", 16), *both]}
    out = Console(width=200)
    with out.capture() as printed:
        report.show(bench, out)
    assert printed.get().count("torch-gloo left out of copy: copy is not measured on torch") == 1
    assert "#wrong" in printed.get() and "failed" not in printed.get()


def test_ranks_sleep_between_their_turns_and_are_gone_afterwards() -> None:
    with ContestantGroup("memcpy", 2) as group:
        pids = [worker.pid for worker in group.workers]
        group.measure(COPY, 10.0)

        def spent() -> float:
            return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)

        before = spent()
        time.sleep(0.3)
        assert spent() - before <= 0.02, "clock ticks of 10 ms"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not group.place.folder.exists()


@pytest.mark.thorough
def test_shared_files_of_open_mpi_lie_in_the_folder_that_is_removed() -> None:
    if (reason := missing("openmpi")) is not None:
        pytest.skip(reason)
    with ContestantGroup("openmpi", 2) as group:
        segments = [path for path in group.place.shared.iterdir() if path.name != MARKER]
        assert {path.name.split(".")[0] for path in segments} == {"sm_segment"}
        for worker in group.workers:  # once the first has died, mpirun ends the other
            worker.kill()
    assert not any(path.exists() for path in segments)


# The command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_json_and_writes_a_plot_and_a_report_with_its_data(tmp_path: Path) -> None:
    picture = tmp_path / "plot.png"
    asked = ["copy", "-n", "1:2", "--sizes", "8,1K", "--seconds", "0.02", "--rounds", "2"]
    told = said_as_json("bench", *asked, "--plot", picture, "--report", tmp_path)
    assert [row["nbytes"] for row in told["rows"]] == [8, 1024] * 2
    assert told["machine"]["cpus"] >= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Pictures" in (tmp_path / "report.html").read_text()
    written = msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Bench)
    assert written == msgspec.convert(told, Bench) and written.wrong == 0


def test_a_plot_without_data_is_an_error(tmp_path: Path) -> None:
    bench = rounds.run(_plan((), ()))
    with pytest.raises(ValueError, match="nothing to plot"):
        report.plot(bench, tmp_path / "plot.png")


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_repeated_sums_in_place_stay_finite(tmp_path: Path, ranks: int) -> None:
    operation = OPERATIONS["all_reduce_reproducible"]
    bound = Bound(summing(ranks), operation, 64, "float32")
    bound.fill(1)
    WorkerBarrier.create(tmp_path / "barrier", 1)
    alone = WorkerBarrier(tmp_path / "barrier", 0, 1)
    for times, block in ((500, 1), (20, int(operation.in_a_row(ranks)))):
        assert len(time_ops(bound, bound.call.run, 1, alone, times, block)) == times
        assert np.isfinite(bound.source).all()
    alone.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "plan",
    [
        RecoveryPlan(ranks=3, kills=2, spares=2),
        RecoveryPlan(ranks=4, kills=1, together=2),
        RecoveryPlan(ranks=4, kills=1, proposer=True),
        RecoveryPlan(ranks=3, kills=1, stopped=True),
    ],
    ids=["spares", "two at once", "the proposer", "stopped"],
)
def test_recovery_is_measured_on_real_faults(plan: RecoveryPlan) -> None:
    bench = recovery.run(plan)
    assert len(bench.kills) == plan.kills
    silent = Timeouts().suspect - Timeouts().heartbeat  # the last heartbeat was before the stop
    least = 1e3 * silent * plan.stopped
    assert all(least <= kill.detect <= kill.agree <= kill.rebuild <= kill.total for kill in bench.kills)
    assert bench.total.median == pytest.approx(sum(kill.total for kill in bench.kills) / plan.kills)
    recovery.show_recovery(bench, console())


def test_processor_time_of_a_child_is_noise_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a second in which the machine was busy for nine."""
    seconds, busy = iter([0.0, 1.0, 1.0]), iter([0.0, 9.0, 9.0])
    monkeypatch.setattr(results, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(results, "_busy", lambda: next(busy))
    noise = Noise()
    burn = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        next_line(child.stdout)
        running = noise.cpus()
    assert running - noise.cpus() > 0.4


# The page and its pictures ----------------------------------------------------------------------------------------

MACHINE = Machine("a processor", 2, "6.1", "3.11", "2.13", 0.05)
NAMES = ("holdfast:shm", "openmpi", "memcpy")


def row(op: str, ranks: int, contestant: str, nbytes: int, microseconds: float) -> BenchRow:
    timing = Timing.of([microseconds / 1e6] * 3, 1)
    bandwidth = nbytes / microseconds / 1e3
    return BenchRow(
        op=op, ranks=ranks, contestant=contestant, nbytes=nbytes, dtype="float32", timing=timing, single=timing,
        turns=(microseconds,) * 3, algbw=bandwidth, busbw=bandwidth, wrong=0,
    )  # fmt: skip


def sample(slower: float = 1.0, ranks: Sequence[int] = (2, 4), failures: tuple[OpFailure, ...] = ()) -> Bench:
    """Two sizes of all_reduce by three contestants."""
    rows = [
        row("all_reduce", number, name, size, slower * (3 + size / 9000) * (1 + index) * number)
        for number in ranks
        for size in (8, 1 << 20)
        for index, name in enumerate(NAMES)
    ]
    rows.append(row("barrier", ranks[0], NAMES[0], 0, slower * 5.0))
    return Bench(
        command="holdfast bench all_reduce", machine=MACHINE, contestants={"shm": "x"}, skipped={}, rows=tuple(rows),
        ratios=ratios(rows, NAMES[:1]), failures=failures,
    )  # fmt: skip


def test_the_page_has_charts_with_the_roofline_and_names_and_a_failure_of_ours_at_the_top() -> None:
    assert [name for name, _ in report.bandwidths(sample())] == ["all_reduce-2", "all_reduce-4"]
    assert [name for name, _ in report.sweeps(sample())] == ["all_reduce-8-ranks", "all_reduce-1048576-ranks"]
    text = report.render(sample(), when="today")
    assert len(pictures(text)) == 2 + 2 + 2, "bandwidth and time for 2 and 4 ranks, time over ranks for two sizes"
    assert text.count('class="roof"') == 2, "where there is bandwidth there is the roofline"
    assert "✓ all results right" in text
    assert "1 MiB" in text
    broken = OpFailure(op="all_reduce", ranks=2, contestant="holdfast:shm", nbytes=8, reason="it <broke>")
    text = report.render(sample(failures=(broken,)))
    assert "✗ not all is well" in text
    assert "it &lt;broke&gt;" in text


def test_lines_of_a_chart_stay_inside_and_their_names_apart() -> None:
    series = [
        charts.Series(f"number {index}", ((8.0, 1e-3 * (index + 1)), (1e6, 50.0 + index / 100)), index)
        for index in range(6)
    ]
    chart = charts.draw_lines("many", series, str, str, "GB/s")
    drawing = ElementTree.fromstring(chart.svg("a chart", standalone=True))
    names = [each for each in drawing.iter() if (each.text or "").startswith("number") and each.tag.endswith("text")]
    heights = sorted(float(each.get("y", "nan")) for each in names)
    assert len(heights) == 6
    assert all(below - above >= charts.LABEL_GAP - 0.1 for above, below in itertools.pairwise(heights))
    width, height = map(float, drawing.attrib["viewBox"].split()[2:])
    dots = [each for each in drawing.iter() if each.tag.endswith("use")]
    assert all(0 < float(dot.get("x", 0)) < width and 0 < float(dot.get("y", 0)) < height for dot in dots)
    assert "number 3, 8.0: 0.004" in [each.text for each in drawing.iter() if each.tag.endswith("title")]
    with pytest.raises(ValueError, match="nothing to draw"):
        charts.draw_lines("none", [], str, str, "")


def test_a_chart_takes_the_colours_of_its_page_and_alone_it_brings_them() -> None:
    chart = charts.draw_lines("one", [charts.Series("a", ((1.0, 1.0), (2.0, 3.0)), 0)], str, str, "y")
    inside = chart.svg("one")
    assert "var(--s0)" in inside and not re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", inside)
    assert "<style" not in inside and "prefers-color-scheme: dark" in chart.svg("one", standalone=True)


@pytest.mark.parametrize("columns", [60, 80])
def test_the_tables_of_a_bench_fit_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = console()
    with out.capture() as printed:
        report.show(sample(), out)
    lines = printed.get().splitlines()
    assert not any(line.startswith(("p50: ", "size: 8", "library: ", "now: ")) for line in lines), "a line a figure"
    assert "not shown at this width: min" in printed.get()
    assert sum("all_reduce" in line for line in lines) == 2
    assert max(map(len, (line for line in lines if line[:1] in "\u2502\u2503"))) <= columns


# -- the reader of recoveries: from events to when a fault was known and each process went on


def log(*lines: tuple[float, str, str, dict[str, Any]]) -> list[Event]:
    return [an_event(kind, who, at, **fields) for at, who, kind, fields in lines]


BEFORE = log(
    (1.0, "a", "installed", {"epoch": 4, "members": ["a", "b", "c"]}),
    (1.9, "a", "committed", {"epoch": 4, "step": 6}),
)
KILLED = log(
    (2.005, "b", "committed", {"epoch": 4, "step": 6}),  # of the view before
    (2.01, "b", "detected", {"members": ["c"]}),
    (2.02, "a", "detected", {"members": ["c"]}),
    (2.05, "b", "revoked", {"epoch": 4}),
    (2.1, "b", "installed", {"epoch": 5, "members": ["a", "b"]}),
    (2.3, "a", "installed", {"epoch": 5, "members": ["a", "b"]}),
    (2.34, "b", "rebuilt", {"epoch": 5}),
    (2.33, "a", "rebuilt", {"epoch": 5}),
    (2.35, "b", "committed", {"epoch": 5, "step": 7, "how": "recovered"}),  # complete before the fault
    (2.5, "b", "committed", {"epoch": 5, "step": 8}),
    (2.4, "a", "committed", {"epoch": 5, "step": 8}),
    (2.9, "a", "committed", {"epoch": 5, "step": 9}),
)


def test_each_process_has_its_first_moments_of_the_next_view_and_the_last_gives_the_times_of_a_recovery() -> None:
    found = recovery_of(BEFORE + KILLED, 2.0, {"c"})
    assert found.over
    assert (found.detected, found.members) == (2.01, ("a", "b"))
    assert found.installed == {"a": 2.3, "b": 2.1}
    assert found.rebuilt == {"a": 2.33, "b": 2.34}
    assert found.resumed == {"a": 2.4, "b": 2.5}
    assert moments_of(found) == RecoveryMoments(pytest.approx(0.3), pytest.approx(0.5))
    kill = timing_of(found, rank=2, gone=2.0015, survivors={"a", "b"})
    taken = (kill.rank, kill.gone, kill.detect, kill.agree, kill.rebuild, kill.total)
    assert taken == pytest.approx((2, 1.5, 10, 300, 340, 500))
    reduced = log((2.6, "a", "first_op", {"epoch": 5, "rank": 0, "completed": 2.36}))
    assert recovery_of(KILLED[:8] + reduced, 2.0, {"c"}).resumed == {"a": 2.36}, "complete before it was checked"


def test_a_view_with_another_that_was_killed_and_a_newcomer_that_comes_later_do_not_belong_to_the_recovery() -> None:
    between = log((2.06, "a", "installed", {"epoch": 5, "members": ["a", "b", "d"]}))
    assert recovery_of(between + KILLED, 2.0, {"c"}).members == ("a", "b", "d")
    assert recovery_of(between + KILLED, 2.0, {"c", "d"}).members == ("a", "b")
    newcomer = log(
        (8.0, "e", "installed", {"epoch": 6, "members": ["a", "b", "e"]}), (8.1, "e", "rebuilt", {"epoch": 6})
    )
    found = recovery_of(BEFORE + KILLED + newcomer, 2.0, {"c"})
    assert (found.members, found.over) == (("a", "b"), True)


def test_a_fault_that_ends_no_epoch_has_the_next_commit_alone() -> None:
    """A spare dies; what ends an epoch later is another fault, and so is a copy that is made then."""
    spare = log((2.01, "a", "detected", {"members": ["spare"]}), (2.2, "a", "committed", {"step": 7}))
    later = log((3.1, "a", "revoked", {"epoch": 4}), (3.2, "a", "replica_made", {"version": 3}))
    found = recovery_of(BEFORE + spare + later, 2.0, until=3.0)
    assert (found.detected, found.replaced, found.members) == (2.01, None, ())
    assert found.resumed == {"a": 2.2}


def test_the_work_of_a_role_that_another_process_took_over() -> None:
    lost = log(
        (2.01, "driver", "process_lost", {"role": "driver"}),
        (2.1, "trainer", "committed", {"step": 7}),
        (4.0, "driver/2", "process_replaced", {"role": "driver"}),
        (4.5, "trainer/2", "committed", {"step": 7}),
    )
    found = recovery_of(lost, 2.0)
    assert (found.replaced, found.resumed) == (4.0, {"trainer/2": 4.5})


def test_waiting_for_a_recovery_that_does_not_come_says_who_is_late() -> None:
    reads = iter([BEFORE, BEFORE + KILLED])
    assert wait_for_recovery(lambda: next(reads), 2.0, {"c"}, limit=60.0, every=0.0).over
    with pytest.raises(NotRecovered, match="no next view began within 0 s of the loss of c"):
        wait_for_recovery(lambda: BEFORE, 2.0, {"c"}, limit=0.0, every=0.0)
    with pytest.raises(NotRecovered, match="members a did not work again"):
        wait_for_recovery(lambda: KILLED[:-2], 2.0, {"c"}, limit=0.0, every=0.0)
