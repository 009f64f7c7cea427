"""UCX's own benchmark, `ucx_perftest`, as a contestant: one-sided ops and messages of libucp, measured by itself.

It is a program in C, so it shows what UCX can do without Python. A client and a server are started anew for each turn.
It reports averages over a turn, and does not check the bytes that it moves.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from pathlib import Path

from holdfast.ft.launch.torch_environment import ReservedPort
from holdfast.harness.bench.collectives.definitions import SMALL
from holdfast.harness.bench.collectives.ranks import Measure, Measurement
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


def missing() -> str | None:
    """Why it cannot run here and what to install; None if it can."""
    return None if program() is not None else f"there is no ucx_perftest; {INSTALL}"


class Perftest:
    """The two processes of a turn. Between orders there are none."""

    contestant = UCX_PERFTEST

    def __init__(self, ranks: int) -> None:
        path = program()
        if path is None:
            raise WorkerFailed(str(missing()))
        if ranks != 2:
            raise WorkerFailed(f"ucx_perftest has two ranks, not {ranks}")
        self.ranks = ranks
        home = path.parents[1]
        libraries = f"{home / 'lib'}:{home.parent / 'libucx_cu12.libs'}"
        self._environment = {"UCX_TLS": SAME_HOST} | os.environ | {"LD_LIBRARY_PATH": libraries}
        self._command = [str(path)] if os.access(path, os.X_OK) else [_LINKER, str(path)]
        self._running: list[subprocess.Popen[str]] = []

    @property
    def detail(self) -> str:
        """The library, and its transports."""
        return f"ucx_perftest over {self._environment['UCX_TLS']}; averages of a turn; bytes not checked"

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
        return [Measurement([(0, round(1e3 * microseconds))], [], None)] * self.ranks

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
