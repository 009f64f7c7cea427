"""The running workers of one contestant, and how they are started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.paths import bind_unix
from holdfast.comms.transport.liveness import HOST
from holdfast.ft.console.output import tail
from holdfast.ft.launch.held_directory import SHARED_MEMORY, HeldDirectory
from holdfast.ft.processes.message_socket import MessageSocket
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote, zygote_with
from holdfast.harness.bench.store.actors_program import ActorsProgram
from holdfast.harness.bench.store.drivers import (
    HOLDFAST,
    MEMCPY,
    SAFETENSORS,
    TORCHSTORE,
    WorkerPlan,
    torchstore_home,
)
from holdfast.harness.bench.store.team_plan import TeamPlan
from holdfast.harness.bench.store.wire import (
    DECODER,
    Answer,
    Failed,
    Message,
    Order,
    Prepare,
    StopStoreWorker,
    StoreWorkerReady,
    TensorShape,
)
from holdfast.harness.bench.store.worker import SOCKET, work

SEED = 1
PRELOAD = ("holdfast.store", "holdfast.harness.bench.store.worker", "torch.distributed.checkpoint")
"""What workers import: once, in the process that they are forked from."""
END_SECONDS = 10.0
START_SECONDS = 120.0
ANSWER_SECONDS = 300.0
"""Seconds that a worker may take for one order."""


class WorkerFailed(HoldfastError):
    """A worker of a contestant failed, ended, or did not answer in time."""


def missing(contestant: str, source: Path | None) -> str | None:
    """Why `contestant` cannot run here and what to do about it; None if it can."""
    if contestant == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        return "safetensors is not installed; pip install safetensors"
    if contestant == TORCHSTORE:
        if source is None:
            return "no checkout of torchstore's main branch was given: --torchstore-source, or HOLDFAST_TORCHSTORE"
        if not (source / "torchstore" / "__init__.py").is_file():
            return f"there is no torchstore in {source}"
        if importlib.util.find_spec("monarch") is None and not any(torchstore_home().glob("lib/*/*/monarch")):
            return f"Monarch is not in {torchstore_home()}; make store-peers"
    return None


class Worker:
    """One worker. Orders that several carry out at once are sent to all before the first answer is read."""

    def __init__(self, line: MessageSocket[Message], ready: StoreWorkerReady) -> None:
        self.role, self.rank, self.pid, self.detail = ready.role, ready.rank, ready.pid, ready.detail
        self.line = line
        self.process = os.pidfd_open(ready.pid)

    def send(self, order: Order) -> None:
        try:
            self.line.send(order)
        except (EOFError, TimeoutError) as error:
            raise WorkerFailed(f"the {self.role}: {error}") from error

    def answer(self, timeout: float = ANSWER_SECONDS) -> Answer:
        try:
            answer = self.line.receive(timeout)
        except (EOFError, TimeoutError, OSError) as error:
            raise WorkerFailed(f"the {self.role}: {error}") from error
        if isinstance(answer, Failed):
            raise WorkerFailed(f"the {self.role}: {answer.text}")
        assert isinstance(answer, Answer)
        return answer

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)

    def close(self) -> None:
        self.line.close()
        os.close(self.process)


class Team:
    """All workers of a contestant. A context manager; between orders all of them are asleep."""

    def __init__(self, contestant: str, plan: TeamPlan) -> None:
        self.contestant, self.plan = contestant, plan
        self._folder = HeldDirectory("holdfast-bench-store-")
        self._shared = HeldDirectory("holdfast-bench-store-", SHARED_MEMORY)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._processes: list[ForkedProcess] = []
        self._program: ActorsProgram | None = None
        self._workers: list[Worker] = []
        self._prepare: Prepare | None = None
        try:
            bind_unix(self._listener, self._folder.path / SOCKET)
            self._listener.listen(64)
            deadline = time.monotonic() + START_SECONDS
            roles = self._roles()
            self._start(roles)
            self._gather(len(roles), deadline)
        except BaseException:
            self.close(gently=False)
            raise

    @property
    def detail(self) -> str:
        """The library and its version."""
        return self._workers[0].detail

    @property
    def publishers(self) -> Sequence[Worker]:
        """The workers that change and publish their source."""
        return [each for each in self._workers if each.role in ("publisher", "both")]

    @property
    def readers(self) -> Sequence[Worker]:
        return [each for each in self._workers if each.role in ("reader", "both")]

    @property
    def holders(self) -> Sequence[Worker]:
        return [each for each in self._workers if each.role == "holder"]

    def prepare(self, tensors: tuple[TensorShape, ...], sharded: bool = False) -> None:
        """Tell all workers what the state is, and whether publishers and readers have shards of it."""
        self._prepare = Prepare(tensors, SEED, (self.plan.publishers, self.plan.readers) if sharded else None)
        for worker in self._workers:
            worker.send(self._prepare)
        for worker in self._workers:
            worker.answer()

    def replace(self, worker: Worker) -> None:
        """Kill a worker and start another one in its role, prepared like the others."""
        worker.kill()
        worker.close()
        self._workers.remove(worker)
        for process in [each for each in self._processes if each.pid == worker.pid]:
            process.close()
            self._processes.remove(process)
        self._start([(worker.role, worker.rank)])
        (new,) = self._gather(1, time.monotonic() + START_SECONDS)
        if self._prepare is not None:
            new.send(self._prepare)
            new.answer()

    def _roles(self) -> Sequence[tuple[str, int]]:
        plan = self.plan
        counts = {"publisher": plan.publishers, "holder": plan.holders, "reader": plan.readers}
        if self.contestant == MEMCPY:
            counts = {"both": plan.readers}
        elif self.contestant != HOLDFAST:
            counts["holder"] = 0
        return [(role, rank) for role, count in counts.items() for rank in range(count)]

    def _start(self, roles: Sequence[tuple[str, int]]) -> None:
        if self.contestant == TORCHSTORE:
            self._program = ActorsProgram(self.plan, self._folder.path, self._shared.path, self._output)
            return
        zygote_with(*PRELOAD)
        folder, shared = self._folder.path, self._shared.path
        plane, environ = "auto", {"HOLDFAST_CHECK": "0"}
        if self.plan.apart:
            plane, environ = "ucx", environ | {"UCX_TLS": "tcp,self"}
        nbytes = self.plan.nbytes // self.plan.publishers
        for role, rank in roles:
            plan = WorkerPlan(role, rank, folder, shared, self.plan.replicas, nbytes, plane)
            process = zygote().spawn(
                partial(work, self.contestant, plan),
                name=f"{self.contestant} {role}",
                output=self._output,
                threads=self.plan.threads,
                environ=environ | ({HOST: "readers"} if self.plan.apart and role == "reader" else {}),
            )
            self._processes.append(process)

    @property
    def _output(self) -> Path:
        return self._folder.path / "output"

    def _gather(self, count: int, deadline: float) -> list[Worker]:
        """Accept the connections of `count` workers. Raises `WorkerFailed` if they do not come."""
        come: list[Worker] = []
        while len(come) < count:
            if not self._all_run():
                raise WorkerFailed(f"{self.contestant} ended while starting: {self._last_words()}")
            if time.monotonic() > deadline:
                raise WorkerFailed(f"{self.contestant} did not start in time: {self._last_words()}")
            self._listener.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                line = MessageSocket(self._listener.accept()[0], DECODER)
                ready = line.receive(5.0)
                assert isinstance(ready, StoreWorkerReady)
                come.append(Worker(line, ready))
        self._workers = sorted([*self._workers, *come], key=lambda each: (each.role, each.rank))
        return come

    def _all_run(self) -> bool:
        return all(process.alive() for process in self._processes) and not (self._program and self._program.failed())

    def _last_words(self) -> str:
        return tail(self._output) or "it said nothing"

    def close(self, gently: bool = True) -> None:
        """End all workers: ask first if `gently`, then SIGKILL those that still run. Idempotent."""
        for worker in self._workers if gently else ():
            with contextlib.suppress(WorkerFailed):
                worker.send(StopStoreWorker())
        deadline = time.monotonic() + (END_SECONDS if gently else 0.0)
        for process in self._processes:
            with contextlib.suppress(TimeoutError):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.close()
        if self._program is not None:
            self._program.close(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            worker.kill()
            worker.close()
        self._workers, self._processes, self._program = [], [], None
        self._listener.close()
        self._folder.close()
        self._shared.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(gently=error is None)
