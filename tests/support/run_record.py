"""What each test cost, and where to read on: a pytest plugin.

`--record FOLDER` keeps `costs.json`, the seconds of processor and of wall time of each test, `failures.txt`, the output
of each failure, and `ended`, how the run did: pytest's name of its status, or LEAKS. A test's processor time is that of
its worker and of all processes below it: those that the zygote forked too, because a test that waits for a busy machine
costs nothing, and one that starts processes does.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.leaks import children_of

SLOWEST = 5
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
_BYTES_OF_A_WORKER = 2 << 30
"""A worker, its zygote and the ranks of the tests that start most."""


def processor_seconds() -> float:
    """Seconds that this process, those that it has waited for, and all living ones below it have computed."""
    past = resource.getrusage(resource.RUSAGE_CHILDREN)
    below = sum(map(_computed, _descendants(os.getpid())))
    return time.process_time() + past.ru_utime + past.ru_stime + below


def _descendants(pid: int) -> Iterator[int]:
    for child in children_of(pid):
        yield child
        yield from _descendants(child)


def _computed(pid: int) -> float:
    """Its own seconds, and those of its children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * _TICK


class RunRecord:
    """Collects reports where they are printed: in the only process, or in that which starts xdist's workers."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.costs: dict[str, tuple[float, float]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "failures.txt").write_text("")
            (folder / "ended").unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep what a test cost, and the output of one that failed."""
        if (cost := getattr(report, "cost", None)) is not None:
            self.costs[report.nodeid] = tuple(cost)
        if report.failed and self.folder is not None:
            with (self.folder / "failures.txt").open("a") as file:
                file.write(f"{'=' * 20} {report.nodeid} ({report.when})\n{report.longreprtext}\n")
                file.writelines(f"{'-' * 20} {name}\n{text}\n" for name, text in report.sections)

    def pytest_sessionfinish(self) -> None:
        """Write the costs, the dearest test first."""
        if self.folder is not None:
            dearest = dict(sorted(self.costs.items(), key=lambda item: -item[1][0]))
            (self.folder / "costs.json").write_text(json.dumps(dearest, indent=0))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None]:
        """Say what is slow and where the logs are, right above the last line."""
        yield
        if not self.costs:
            return
        terminalreporter.section("summary")
        for nodeid, (computed, wall) in sorted(self.costs.items(), key=lambda item: -item[1][0])[:SLOWEST]:
            terminalreporter.line(f"slow: {computed:.1f} s of processor time in {wall:.1f} s: {nodeid}")
        terminalreporter.line(f"all tests: {sum(cost for cost, _ in self.costs.values()):.0f} s of processor time")
        if self.folder is not None:
            terminalreporter.line(f"logs: {self.folder}/failures.txt, {self.folder}/costs.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FOLDER", type=Path, help="keep costs.json and failures.txt there")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunRecord(config.getoption("--record")), "run-record")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note when a test starts, before its fixtures do."""
    item.stash[_START] = processor_seconds(), time.monotonic()
    return (yield)


_START = pytest.StashKey[tuple[float, float]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Put the cost into the last report of a test, which goes from an xdist worker to the main process."""
    report = yield
    if call.when == "teardown":
        computed, started = item.stash[_START]
        report.cost = round(max(0.0, processor_seconds() - computed), 3), round(time.monotonic() - started, 3)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`, as far as memory allows: three a core in the first tier, of which a worker waits for half of its time.

    Two a core for the second, whose tests are several processes each: with three they take a tenth longer.
    """
    a_core = 3 if config.getoption("markexpr") == "not thorough" else 2
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(memory["MemAvailable"].split()[0]) << 10
    return max(1, min(a_core * len(os.sched_getaffinity(0)), free // _BYTES_OF_A_WORKER))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the tests with a limit of their own, which are the long ones, over the workers, to be begun first.

    xdist gives each worker an equal run of the list, to begin with. A long test at the end would leave the others idle.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    long_first: list[pytest.Item] = []
    limits = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("timeout"))}
    long = sorted(limits, key=lambda item: -limits[item])
    others = deque(item for item in items if item not in limits)
    share = -(-len(items) // workers)
    for worker in range(workers):
        dealt = long[worker::workers]
        long_first += dealt + [others.popleft() for _ in range(min(share - len(dealt), len(others)))]
    items[:] = long_first
