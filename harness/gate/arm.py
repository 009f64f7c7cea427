"""The program that forks the processes of both commits: it imports torch once, and nothing of holdfast.

Both sides of a pair are forked from it, so they share its libraries, memory layout and hash seed, and differ in nothing
but the code of holdfast. It is run by its path, `python arm.py WORKLOADS RANKS`. On standard input it is given a line
for each side, a `SideOrder` as JSON, and answers with the pid of the side's rank 0, which forks the others. All of them
serve `GateRank` at the address of the order.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import process_time_ns
from typing import Any

import msgspec

Op = Callable[[], object]
WARM_UP = 20
ATTEMPTS = 2
PRELOADED = ("torch.distributed", "torch.distributed.rendezvous", "numpy", "pluggy", "xxhash", "sqlite3")
"""Imported once, before any process is forked: none of them belongs to a side."""
PRIORITY = -10
"""The nice value, where permitted, against interruptions. Processes run one at a time, for milliseconds."""

UNIX_SOCKETS = Path(__file__).parents[2] / "comms" / "system" / "files.py"
WORKER = Path(__file__).parents[1] / "measure" / "worker.py"
"""The gate's own modules, loaded by path, not those of a side."""


class SideOrder(msgspec.Struct, frozen=True):
    """Be the process of a side: the code in `site`, on `cpu`, with the empty `folder` and the file `output`."""

    site: str
    cpu: int
    folder: str
    output: str
    address: str


def _load(name: str, path: Path | str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class GateRank:
    """One rank of every workload."""

    def __init__(self, rank: int, workloads: dict[str, Any], folder: Path) -> None:
        self._rank, self._workloads, self._folder = rank, workloads, folder
        self._ops: dict[str, Op] = {}

    def prepare(self, name: str) -> None:
        """Make the op of a workload, and warm it up."""
        if name in self._ops:
            return
        workload, folder = self._workloads[name], self._folder / name
        folder.mkdir(exist_ok=True)
        op = self._ops[name] = workload.make(self._rank, workload.ranks, folder)
        for _ in range(WARM_UP):
            op()

    def run(self, name: str, ops: int) -> int:
        """CPU nanoseconds of `ops` ops with warm caches.

        One rank alone repeats them, a few times at most, if it was interrupted.
        """
        op, alone = self._ops[name], self._workloads[name].ranks == 1
        gc.collect(0)
        gc.disable()
        for _ in range(max(2, ops // 8)):
            op()
        repeats = range(ops)
        taken = 0
        for _ in range(ATTEMPTS if alone else 1):
            interruptions = getrusage(RUSAGE_SELF).ru_nivcsw
            start = process_time_ns()
            for _ in repeats:
                op()
            taken = process_time_ns() - start
            if getrusage(RUSAGE_SELF).ru_nivcsw == interruptions:
                break
        gc.enable()
        return taken


def _be(order: SideOrder, workloads: dict[str, Any], ranks: int, worker: Any) -> None:
    """Serve as rank 0 of a side until the gate hangs up, with a child for each further rank."""
    with Path(order.output).open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.path.insert(0, order.site)
    os.sched_setaffinity(0, {order.cpu})
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    os.environ["OMP_NUM_THREADS"] = "1"
    from holdfast import comms

    with contextlib.suppress(ImportError):
        importlib.import_module("holdfast.comms.plugins.registry").registry()  # loads the backends, once for all ranks
    others = []
    for rank in range(1, ranks):
        others.append(os.fork())
        if others[-1] == 0:
            _serve(order, workloads, rank, worker, comms)
            return
    _serve(order, workloads, 0, worker, comms)
    for pid in others:
        os.waitpid(pid, 0)


def _serve(order: SideOrder, workloads: dict[str, Any], rank: int, worker: Any, comms: Any) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _load("holdfast_gate_unix_sockets", UNIX_SOCKETS).connect_unix(connection, order.address)
        where = str(Path(comms.__file__).resolve())
        worker.serve_on(connection, GateRank(rank, workloads, Path(order.folder)), "rank", rank, where)


def _reap(*_: object) -> None:
    """Reap ended children, so that their CPU time counts as ours."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(workloads_path: str, ranks: int) -> None:
    import torch

    for name in PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    worker = _load("holdfast_gate_worker", WORKER)
    workloads = {each.name: each for each in _load("holdfast_gate_workloads", workloads_path).WORKLOADS}
    signal.signal(signal.SIGCHLD, _reap)
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            status = 1
            try:
                _be(msgspec.json.decode(line, type=SideOrder), workloads, ranks, worker)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
