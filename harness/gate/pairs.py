"""Starts fresh pairs of processes, one of each side, and lets them take turns."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.paths import bind_unix
from holdfast.ft.launch.held_directory import HeldDirectory, private_file
from holdfast.harness.gate import arm, workloads
from holdfast.harness.gate.sides import Side, free_cpu
from holdfast.harness.gate.workloads import Workload

ANSWER_SECONDS = 60.0
FEWEST_GROUPS, ENOUGH_SECONDS = 8, 0.4
"""On a busy machine, where turns take long, a workload gets at most so many groups after so many seconds."""


class SideFailed(HoldfastError):
    """A process of one side did not start, or ended."""


class CannotRun(Exception):
    """A side cannot run a workload: it lacks a part that the workload uses, or fails. `process` is that side's."""

    def __init__(self, process: SideProcess, reason: str) -> None:
        super().__init__(reason)
        self.process = process


class SideProcess:
    """A process that runs the code of one side, and sleeps between orders."""

    def __init__(self, side: Side, connection: socket.socket) -> None:
        self._side, self._connection = side, connection
        connection.settimeout(ANSWER_SECONDS)
        self._stream = cast(BinaryIO, connection.makefile("rwb"))

    def hello(self) -> dict[str, Any]:
        return self._answer()

    def prepare(self, workload: Workload) -> None:
        """Prepare a workload. Raises `CannotRun`."""
        self._order({"prepare": workload.name})

    def run(self, workload: Workload, ops: int) -> float:
        """Run `ops` ops; returns their CPU seconds. Raises `CannotRun`."""
        return float(self._order({"run": workload.name, "ops": ops})["cpu"]) / 1e9

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            self._stream.write(json.dumps(order).encode() + b"\n")
            self._stream.flush()
        answer = self._answer()
        if "error" in answer:
            raise CannotRun(self, f"{self._side.title}: {answer['error']}")
        return answer

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._stream.readline()
        except OSError as error:
            raise SideFailed(f"a process of {self._side.title} is silent: {error}") from error
        if not line:
            raise SideFailed(f"a process of {self._side.title} ended")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process and its other ranks, and return when they are gone."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while self._connection.recv(4096):
                pass
        with contextlib.suppress(OSError):
            self._stream.close()
        self._connection.close()


@dataclass(frozen=True, slots=True)
class GateTurn:
    """One side's part of a group of turns: its process, and its extra work as a share."""

    process: SideProcess
    extra: float = 0.0


class PairLauncher:
    """Starts pairs by a program that has torch imported and forks all processes. A context manager."""

    def __init__(self) -> None:
        self._folder = HeldDirectory("holdfast-gate-")
        self._directory = self._folder.path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = str(self._directory / "socket")
        bind_unix(self._listener, address)
        self._listener.listen(8)
        self._listener.settimeout(ANSWER_SECONDS)
        self._keys = itertools.count()
        self._errors = private_file(self._directory / "errors", "wb")
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, arm.PRIORITY)
        self._program = subprocess.Popen(
            [sys.executable, "-P", str(arm.__file__), str(workloads.__file__), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    @contextlib.contextmanager
    def pair(self, sides: Sequence[Side]) -> Iterator[list[SideProcess]]:
        """Start a process of each side, all on one CPU; end them with the block. Raises `SideFailed`."""
        cpu = free_cpu()
        with (
            tempfile.TemporaryDirectory(prefix="pair-", dir=self._directory, ignore_cleanup_errors=True) as folder,
            contextlib.ExitStack() as started,
        ):
            yield [started.enter_context(contextlib.closing(self._start(side, cpu, Path(folder)))) for side in sides]

    def _start(self, side: Side, cpu: int, folder: Path) -> SideProcess:
        key = str(next(self._keys))
        own = folder / key
        own.mkdir()
        order = {"key": key, "site": str(side.site), "cpu": cpu, "folder": str(own)}
        stdin = self._program.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
            while True:
                process = SideProcess(side, self._accept(time.monotonic() + ANSWER_SECONDS))
                hello = process.hello()
                if hello["key"] == key:
                    break
                process.close()
        except OSError as error:
            raise SideFailed(f"no process of {side.title} started: {self._last_words() or error}") from error
        if not Path(hello["where"]).is_relative_to(side.root.resolve()):
            process.close()
            raise SideFailed(f"a process of {side.title} runs {hello['where']}, which is not its code")
        return process

    def _accept(self, deadline: float) -> socket.socket:
        """The next connection. Raises `SideFailed`, with the last line of the program's errors, if none comes."""
        self._listener.settimeout(0.1)
        while True:
            with contextlib.suppress(TimeoutError):
                return self._listener.accept()[0]
            words = self._last_words()
            if self._program.poll() is not None or time.monotonic() > deadline or "Error" in words:
                raise SideFailed(f"no process came: {words or 'it said nothing'}")

    def _last_words(self) -> str:
        text = (self._directory / "errors").read_text(errors="replace").strip()
        return text.splitlines()[-1] if text else ""

    def __enter__(self) -> PairLauncher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._program.stdin is not None
        with contextlib.suppress(OSError):
            self._program.stdin.close()
        try:
            self._program.wait(5.0)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait(5.0)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, self._priority)
        self._errors.close()
        self._listener.close()
        self._folder.close()


def slices(turns: Mapping[str, GateTurn], workload: Workload, groups: int) -> dict[str, list[tuple[float, float]]]:
    """Run at most `groups` groups of turns, in turn A B B A and B A A B.

    Returns, by name in `turns`, the times of its two turns in each group. A turn with `extra` 0.05 does 5% more ops but
    is timed as if it had not: a slowdown of 5% in the measured work itself.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    enough = time.monotonic() + ENOUGH_SECONDS
    for number in range(groups):
        if number >= FEWEST_GROUPS and time.monotonic() > enough:
            break
        taken: dict[str, list[float]] = {name: [] for name in turns}
        order = list(turns) if number % 2 == 0 else list(turns)[::-1]
        for name in (*order, *reversed(order)):
            turn = turns[name]
            taken[name].append(turn.process.run(workload, round(workload.ops * (1 + turn.extra))))
        for name, (forth, back) in taken.items():
            found[name].append((forth, back))
    return found
