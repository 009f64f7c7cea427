"""The contestants of a bench: our backends and peer libraries, whether each can run here, and their running ranks."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from holdfast.comms.system.paths import bind_unix
from holdfast.ft.launch.guardian import descendants
from holdfast.ft.launch.held_directory import SHARED_MEMORY, HeldDirectory, private_file
from holdfast.ft.launch.run_report import LATE_SECONDS, whereabouts
from holdfast.ft.processes.message_socket import MessageSocket
from holdfast.harness.bench.collectives.failure import ContestantFailed, OpFailed
from holdfast.harness.bench.collectives.launch import HOLDFAST, launcher_of
from holdfast.harness.bench.collectives.startline import StartLine
from holdfast.harness.bench.collectives.wire import (
    DECODER,
    Measure,
    Measurement,
    MeasurementFailed,
    Message,
    StopWorker,
    WorkerReady,
)
from holdfast.harness.bench.drivers import mpi_programs, perftest
from holdfast.harness.bench.drivers.mpi_programs import MPICH, OPENMPI
from holdfast.harness.bench.drivers.perftest import UCX_PERFTEST, Perftest

PEERS = ("torch-gloo", OPENMPI, MPICH, UCX_PERFTEST)
MEMCPY = "memcpy"


def missing(contestant: str) -> str | None:
    """Why `contestant` cannot run here and what to install; None if it can."""
    if contestant in (OPENMPI, MPICH):
        return mpi_programs.missing(contestant)
    if contestant == UCX_PERFTEST:
        return perftest.missing()
    if contestant.startswith(HOLDFAST):
        return _backend_missing(contestant.removeprefix(HOLDFAST))
    return None


def _backend_missing(backend: str) -> str | None:
    from holdfast.comms.errors import BackendUnavailable
    from holdfast.comms.plugins.registry import registry

    try:
        missing = registry().backend(backend).missing
    except BackendUnavailable as error:
        return str(error)
    return None if missing is None else f"{missing.reason}; {missing.install_hint}"


def _command(contestant: str, key: str, directory: Path, shared: Path, ranks: int) -> tuple[list[str], dict[str, str]]:
    """The program that starts the ranks, and its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "HOLDFAST_CHECK"}
    environment["OMP_NUM_THREADS"] = "1"
    if contestant in (OPENMPI, MPICH):
        launcher = mpi_programs.launcher(contestant, ranks, shared)
        program = [sys.executable, "-m", "holdfast.harness.bench.collectives.worker", key, str(directory)]
        return [*launcher.words, *program], environment | launcher.environment
    program = [
        sys.executable,
        "-m",
        "holdfast.harness.bench.collectives.launch",
        contestant,
        key,
        str(directory),
        str(ranks),
    ]
    if launcher_of(contestant) == "mpirun":
        return [*mpi_programs.launcher(OPENMPI, ranks, shared).words, "--with-ft", "ulfm", *program], environment
    return program, environment


class RunningContestant(Protocol):
    """The running ranks of a contestant."""

    contestant: str
    ranks: int

    @property
    def detail(self) -> str: ...

    def measure(self, order: Measure, timeout: float) -> list[Measurement]: ...

    def close(self, gently: bool = True) -> None: ...


@dataclass(frozen=True, slots=True)
class _Worker:
    line: MessageSocket[Message]
    hello: WorkerReady
    process: int
    """A pidfd: a signal through it reaches this process only, even if its pid is in use again."""


class WorkerGroup:
    """The running ranks of one contestant. Between orders all of them are asleep."""

    def __init__(self, contestant: str, ranks: int, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.contestant, self.ranks = contestant, ranks
        self._process, self._errors = process, errors
        self._members: list[_Worker] = []

    @property
    def detail(self) -> str:
        """The library, its version, and the CPUs that its ranks may run on."""
        cpus = [",".join(map(str, member.hello.cpus)) for member in self._members]
        everywhere = set(cpus) == {",".join(map(str, sorted(os.sched_getaffinity(0))))}
        placing = "not bound" if everywhere else "bound to CPUs " + " | ".join(cpus)
        return f"{self._members[0].hello.detail}; {placing}"

    def gather(self, listener: socket.socket, key: str, deadline: float) -> None:
        """Accept the connections of all ranks. Raises `ContestantFailed` if they do not come."""
        late = time.monotonic() + LATE_SECONDS
        while len(self._members) < self.ranks:
            if time.monotonic() > late:
                late = float("inf")
                self._name_missing()
            if self._process.poll() is not None:
                raise ContestantFailed(f"{self.contestant} ended while starting: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ContestantFailed(f"{self.contestant} did not start in time: {self._last_words()}")
            listener.settimeout(0.1)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            line = MessageSocket(connection, DECODER)
            try:
                hello = line.receive(5.0)
                if isinstance(hello, WorkerReady) and hello.key == key:
                    self._members.append(_Worker(line, hello, os.pidfd_open(hello.pid)))
                    continue
            except (EOFError, OSError):
                pass  # the worker died right after connecting: the next round reports how
            line.close()
        self._members.sort(key=lambda member: member.hello.rank)

    def _name_missing(self) -> None:
        """Print to stderr which ranks have not come after a while, and where the processes are that start them."""
        there = {member.hello.rank: member.hello.pid for member in self._members}
        missing = ", ".join(str(rank) for rank in range(self.ranks) if rank not in there)
        lines = [f"{self.contestant}: after {LATE_SECONDS:.0f} s without rank {missing}; {self._last_words()}"]
        started = (self._process.pid, *descendants(self._process.pid))
        lines += [f"  pid {pid} {whereabouts(pid)}" for pid in started if pid not in there.values()]
        sys.stderr.write("\n".join(lines) + "\n")

    def measure(self, order: Measure, timeout: float) -> list[Measurement]:
        """Give the order to all ranks; their answers by rank.

        Raises NotImplementedError with the library's words if it does not have the op, `OpFailed` if it failed alike on
        every rank, `ContestantFailed` if a rank failed, ended, or did not answer within `timeout` seconds.
        """
        try:
            for member in self._members:
                member.line.send(order)
            answers = self._answers(time.monotonic() + timeout)
        except (EOFError, TimeoutError, OSError) as error:
            raise ContestantFailed(f"{self.contestant} in {order.op}: {error}: {self._last_words()}") from error
        failures = [answer for answer in answers if isinstance(answer, MeasurementFailed)]
        if len(failures) == self.ranks:
            raise (NotImplementedError if failures[0].unmeasured else OpFailed)(failures[0].text)
        if failures:
            raise ContestantFailed(f"{self.contestant} in {order.op}: {failures[0].text}")
        return [answer for answer in answers if isinstance(answer, Measurement)]

    def _answers(self, deadline: float) -> list[Message]:
        """The next message of every rank, by rank; raises as soon as one of them is gone."""
        answers: dict[int, Message] = {}
        with selectors.DefaultSelector() as waiting:
            for member in self._members:
                waiting.register(member.line, selectors.EVENT_READ, member)
            while waiting.get_map():
                ready = waiting.select(deadline - time.monotonic())
                if not ready:
                    raise TimeoutError("no answer in time")
                for key, _ in ready:
                    answers[key.data.hello.rank] = key.data.line.receive(5.0)
                    waiting.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.ranks)]

    def close(self, gently: bool = True) -> None:
        """End all ranks: ask first if `gently`, then SIGKILL those that still run."""
        for member in self._members if gently else ():
            with contextlib.suppress(EOFError, TimeoutError):
                member.line.send(StopWorker())
        try:
            self._process.wait(10.0 if gently else 0.0)
        except subprocess.TimeoutExpired:
            for member in self._members:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(member.process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(3.0)
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(5.0)
        for member in self._members:
            member.line.close()
            os.close(member.process)
        self._members = []

    def _last_words(self) -> str:
        text = self._errors.read_text(errors="replace").strip() if self._errors.exists() else ""
        return text.splitlines()[-1] if text else "it said nothing"


class ContestantLauncher:
    """A private directory with the socket that workers dial, and the groups that were started there."""

    def __init__(self) -> None:
        self._folder = HeldDirectory("holdfast-bench-")
        self._shared = HeldDirectory("holdfast-bench-", SHARED_MEMORY)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bind_unix(self._listener, self._folder.path / "socket")
        self._listener.listen(64)
        self._groups: list[RunningContestant] = []
        self._started = 0

    def start(self, contestant: str, ranks: int, timeout: float = 90.0) -> RunningContestant:
        """Start `ranks` ranks of `contestant`.

        Raises `ContestantFailed` with its last words if it does not come up.
        """
        if contestant == UCX_PERFTEST:
            self._groups.append(Perftest(ranks))
            return self._groups[-1]
        return self.start_group(contestant, ranks, timeout)

    def start_group(self, contestant: str, ranks: int, timeout: float = 90.0) -> WorkerGroup:
        """As `start`, for contestants with our workers as ranks."""
        self._started += 1
        key = f"{self._started}"
        (self._folder.path / f"{key}.line").write_bytes(bytes(StartLine.nbytes(ranks)))
        errors = self._folder.path / f"{key}.errors"
        with private_file(errors, "wb") as stream:
            command, environment = _command(contestant, key, self._folder.path, self._shared.path, ranks)
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        group = WorkerGroup(contestant, ranks, process, errors)
        self._groups.append(group)
        try:
            group.gather(self._listener, key, time.monotonic() + timeout)
        except BaseException:
            self.drop(group)
            raise
        return group

    def drop(self, group: RunningContestant) -> None:
        """Kill a group that failed, and forget it."""
        self._groups.remove(group)
        group.close(gently=False)

    @contextlib.contextmanager
    def groups(self) -> Iterator[None]:
        """End, at exit, the groups that were started inside."""
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        while self._groups:
            self._groups.pop().close()

    def __enter__(self) -> ContestantLauncher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        self._listener.close()
        self._folder.close()
        self._shared.close()
