"""The program that runs both commits: imports torch once, and forks a process for a commit on request.

Both sides of a pair are forked from one process, so they share its libraries, memory layout and hash seed, and differ
in nothing but the code of holdfast. It is run by its path, `python arm.py WORKLOADS SOCKET`, and imports nothing of
holdfast before it has forked. On standard input it is given a line for each process to fork, `{"key", "site", "cpu",
"folder"}`; that process dials the socket, says `{"key", "where"}`, and takes orders, each a line:

- `{"prepare": name}` -> `{}`, or `{"error": why}`
- `{"run": name, "ops": n}` -> `{"cpu": nanoseconds}`: CPU time of all ranks of the workload, this process being rank 0.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import process_time_ns
from typing import Any, BinaryIO, cast

Op = Callable[[], object]
WARM_UP = 20
ATTEMPTS = 2
PRELOADED = ("torch.distributed", "torch.distributed.rendezvous", "numpy", "msgspec", "pluggy", "xxhash", "sqlite3")
"""Imported once, before any process is forked: none of them belongs to a side."""
PRIORITY = -10
"""The nice value, where permitted, against interruptions. Processes run one at a time, for milliseconds."""


UNIX_SOCKETS = Path(__file__).parents[2] / "comms" / "system" / "paths.py"
"""The module that connects to Unix sockets with long paths: the gate's own, loaded by path, not that of a side."""


def _load(name: str, path: Path | str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _stream(connection: socket.socket) -> BinaryIO:
    return cast(BinaryIO, connection.makefile("rwb"))


def _say(stream: BinaryIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


class _Rank:
    """One rank of every workload. Rank 0 forwards its orders to the others."""

    def __init__(self, rank: int, workloads: dict[str, Any], folder: Path, others: list[BinaryIO]) -> None:
        self._rank, self._workloads, self._folder, self._others = rank, workloads, folder, others
        self._ops: dict[str, Op] = {}

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            name = order.get("prepare") or order["run"]
            workload = self._workloads[name]
            helpers = self._others[: workload.ranks - 1]
            for other in helpers:
                _say(other, order)
            if "prepare" in order:
                answer = self._prepare(workload)
            else:
                answer = self._run(self._ops[name], order["ops"], alone=workload.ranks == 1)
            for other in helpers:
                theirs = json.loads(other.readline())
                if "error" in theirs:
                    return dict(theirs)
                if "cpu" in theirs:
                    answer["cpu"] += theirs["cpu"]
            return answer
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _prepare(self, workload: Any) -> dict[str, Any]:
        if workload.name in self._ops:
            return {}
        folder = self._folder / workload.name
        folder.mkdir(exist_ok=True)
        op = self._ops[workload.name] = workload.make(self._rank, workload.ranks, folder)
        for _ in range(WARM_UP):
            op()
        return {}

    @staticmethod
    def _run(op: Op, ops: int, alone: bool) -> dict[str, Any]:
        """Time `ops` ops with warm caches. One rank alone repeats them, a few times at most, if interrupted."""
        gc.collect(0)
        gc.disable()
        for _ in range(max(2, ops // 8)):
            op()
        repeats = range(ops)
        for _ in range(ATTEMPTS if alone else 1):
            interruptions = getrusage(RUSAGE_SELF).ru_nivcsw
            start = process_time_ns()
            for _ in repeats:
                op()
            taken = process_time_ns() - start
            if getrusage(RUSAGE_SELF).ru_nivcsw == interruptions:
                break
        gc.enable()
        return {"cpu": taken}


def _serve(stream: BinaryIO, rank: _Rank) -> None:
    for line in stream:
        _say(stream, rank.obey(json.loads(line)))


def _be(order: dict[str, Any], workloads: dict[str, Any], address: str) -> None:
    """Serve as the process of one commit until the gate hangs up, with a child for each further rank."""
    sys.path.insert(0, order["site"])
    os.sched_setaffinity(0, {order["cpu"]})
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    os.environ["OMP_NUM_THREADS"] = "1"
    from holdfast import comms

    with contextlib.suppress(ImportError):
        importlib.import_module(
            "holdfast.comms.plugins.registry"
        ).registry()  # loads the backends: once, not in every rank
    folder, most = Path(order["folder"]), max(workload.ranks for workload in workloads.values())
    others: list[BinaryIO] = []
    for rank in range(1, most):
        here, there = socket.socketpair()
        if os.fork() == 0:
            here.close()
            for other in others:
                other.close()
            _serve(_stream(there), _Rank(rank, workloads, folder, []))
            return
        there.close()
        others.append(_stream(here))
        here.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _load("holdfast_gate_unix_sockets", UNIX_SOCKETS).connect_unix(connection, address)
        stream = _stream(connection)
        _say(stream, {"key": order["key"], "where": str(Path(comms.__file__).resolve())})
        _serve(stream, _Rank(0, workloads, folder, others))
        for other in others:
            other.close()
        for _ in others:
            os.wait()


def _reap(*_: object) -> None:
    """Reap ended children, so that their CPU time counts as ours."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(workloads_path: str, address: str) -> None:
    import torch

    for name in PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    workloads = {each.name: each for each in _load("holdfast_gate_workloads", workloads_path).WORKLOADS}
    signal.signal(signal.SIGCHLD, _reap)
    for line in sys.stdin.buffer:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            status = 1
            try:
                _be(json.loads(line), workloads, address)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
