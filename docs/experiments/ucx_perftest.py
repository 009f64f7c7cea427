"""How near do one-sided ops come to UCX's own benchmark? `python docs/experiments/ucx_perftest.py get put`.

`ucx_perftest` is a program in C, so it shows what UCX can do without Python. It takes turns with the bench of ours, as
one more contestant. A client and a server are started anew for each turn. It reports averages over a turn, and does not
check the bytes that it moves.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import time
from pathlib import Path
from typing import cast

import msgspec

from holdfast.ft.console.console import console, print_json
from holdfast.ft.console.units import format_bytes
from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.bench.contestants import ContestantGroup
from holdfast.harness.bench.operations import OPERATIONS, SMALL, parse_sizes
from holdfast.harness.bench.ranks import Measure, Measurement
from holdfast.harness.bench.report import BenchRow
from holdfast.harness.bench.run import BenchPlan, Collective, TimedLibrary
from holdfast.harness.measure.results import Noise, figures, others, show_time
from holdfast.harness.measure.rounds import take_turns
from holdfast.harness.measure.stats import pairwise
from holdfast.harness.measure.workers import WorkerFailed

UCX_PERFTEST = "ucx_perftest"
INSTALL = "pip install 'holdfast[ucx]'"
SAME_HOST = "posix,cma,self"
"""The transports of our backend `ucx` between processes of a host, unless UCX_TLS says otherwise."""

_LINKER = "/lib64/ld-linux-x86-64.so.2"
_START_SECONDS = 5.0
_ROUND_TRIP = {"ping_pong": "tag_lat"}
_ONE_WAY = {
    "get": ("ucp_get", "ucp_get"),
    "memory_read": ("ucp_get", "ucp_get"),
    "put": ("ucp_put_lat", "ucp_put_bw"),
    "memory_write": ("ucp_put_lat", "ucp_put_bw"),
    "fetch_add": ("ucp_fadd", "ucp_fadd"),
    "compare_swap": ("ucp_cswap", "ucp_cswap"),
}
"""The tests for small and for large sizes: puts waited for one at a time, or a stream of them."""


def program() -> Path | None:
    """Where `ucx_perftest` is: in the wheel of libucx."""
    found = importlib.util.find_spec("libucx")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "bin" / "ucx_perftest"
    return path if path.exists() else None


class Perftest:
    """The two processes of a turn. Between orders there are none."""

    contestant = UCX_PERFTEST

    def __init__(self) -> None:
        path = program()
        if path is None:
            raise WorkerFailed(f"there is no ucx_perftest; {INSTALL}")
        home = path.parents[1]
        libraries = f"{home / 'lib'}:{home.parent / 'libucx_cu12.libs'}"
        self._environment = {"UCX_TLS": SAME_HOST} | os.environ | {"LD_LIBRARY_PATH": libraries}
        self._command = [str(path)] if os.access(path, os.X_OK) else [_LINKER, str(path)]
        self._running: list[subprocess.Popen[str]] = []

    def measure(self, order: Measure, timeout: float) -> list[Measurement]:
        """One turn. Raises NotImplementedError for an op that it does not have, `WorkerFailed`."""
        nbytes = order.c * (8 if order.dtype.endswith("64") else 4)
        if order.op in _ROUND_TRIP:
            test, ways = _ROUND_TRIP[order.op], 2
        elif order.op in _ONE_WAY:
            test, ways = _ONE_WAY[order.op][nbytes > SMALL], 1
        else:
            raise NotImplementedError(f"{order.op} is not measured by ucx_perftest")
        ops = max(10, order.singles, order.blocks * order.block)
        microseconds = self._run(test, nbytes, ops, timeout) * ways
        return [Measurement([(0, round(1e3 * microseconds))], [], None)] * 2

    def _run(self, test: str, nbytes: int, ops: int, timeout: float) -> float:
        """Microseconds of one op, on average."""
        deadline = time.monotonic() + timeout
        with ReservedPort("127.0.0.1") as reserved:
            return self._run_at(str(reserved.number), test, nbytes, ops, deadline, timeout)

    def _run_at(self, port: str, test: str, nbytes: int, ops: int, deadline: float, timeout: float) -> float:
        server = self._start("-p", port)
        try:
            while True:
                client = self._start(
                    "127.0.0.1", "-p", port, "-t", test, "-s", str(nbytes), "-n", str(ops), "-w", "5",
                    *(("-O", "1") if test.startswith("ucp") else ()), "-f", "-v",
                )  # fmt: skip
                words, errors = client.communicate(timeout=max(0.1, deadline - time.monotonic()))
                if client.returncode == 0:
                    return _average(words)
                if server.poll() is not None or time.monotonic() > deadline - timeout + _START_SECONDS:
                    raise WorkerFailed(f"ucx_perftest {test}: {(errors or words).strip().splitlines()[-1:]}")
                time.sleep(0.05)
        except subprocess.TimeoutExpired as error:
            raise WorkerFailed(f"ucx_perftest {test} did not end in {timeout} s") from error
        finally:
            self.close()

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self._command, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def close(self, gently: bool = True) -> None:
        """End what is running; `gently` gives it a moment first."""
        for process in self._running:
            try:
                process.wait(1.0 if gently else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()
        self._running = []


def _average(words: str) -> float:
    """The overall latency in microseconds, from the CSV that it prints."""
    names, values = [line.split(",") for line in words.strip().splitlines()[-2:]]
    return float(dict(zip(names, values, strict=True))["overall_lat"])


class UcxComparison(msgspec.Struct, frozen=True):
    """Ours and UCX's at one op and size; `speed` is how many times as fast ours was, the median over rounds."""

    ours: BenchRow
    theirs: BenchRow
    speed: float


def compare(ops: list[str], sizes: tuple[int, ...], rounds: int, seconds: float) -> list[UcxComparison]:
    """Measure in turns. Raises `WorkerFailed`, NotImplementedError."""
    plan = BenchPlan(tuple(ops), (), (), (2,), sizes, rounds=rounds, seconds=seconds)
    found, theirs = [], Perftest()
    with ContestantGroup("holdfast:ucx", 2) as ours:
        libraries = {each.contestant: TimedLibrary(cast(ContestantGroup, each)) for each in (ours, theirs)}
        for op in ops:
            for nbytes in sizes:
                workload = Collective(plan, OPERATIONS[op], nbytes, 2)
                turns = take_turns(workload, libraries, range(rounds), _raise)
                one, other = (workload.row(libraries[name], turns[name]) for name in libraries)
                found.append(UcxComparison(one, other, pairwise(one.turns, other.turns).median))
    return found


def _raise(name: str, error: Exception) -> None:
    raise error


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="+", choices=[*_ONE_WAY, *_ROUND_TRIP])
    parser.add_argument("--sizes", type=parse_sizes, default="8,64M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing of each at each size, in all")
    parser.add_argument("--json", action="store_true")
    asked, noise = parser.parse_args(), Noise(zygote_pid)
    found = compare(asked.ops, asked.sizes, asked.rounds, asked.seconds)
    if asked.json:
        print_json(found)
        return
    columns = ("op", "size", "ours", "least", UCX_PERFTEST, "times as fast")
    table = figures("over ucx, 2 ranks", columns, names=("op",), caption=others(noise.cpus()))
    for each in found:
        times = (each.ours.timing.p50, each.ours.timing.min, each.theirs.timing.p50)
        table.add_row(each.ours.op, format_bytes(each.ours.nbytes), *map(show_time, times), f"{each.speed:.3g}")
    console().print(table)


if __name__ == "__main__":
    main()
