"""Recovery by MPI's own fault tolerance, for comparison: Open MPI's ULFM, called as its users call it.

Ranks under mpirun do nothing but Allreduce. One is killed; each survivor revokes the communicator at its first error,
shrinks it, and reduces again on the rest. What counts is the time from just before the signal to the end of the last
survivor's first correct Allreduce, as in `holdfast.harness.bench.recovery.recovery`. Run as a program it is one of the
ranks.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast.comms.system.paths import bind_unix
from holdfast.ft.console.units import counted
from holdfast.ft.launch.held_directory import SHARED_MEMORY, HeldDirectory, private_file
from holdfast.ft.processes.framed_socket import ChannelClosed
from holdfast.ft.processes.message_socket import MessageSocket
from holdfast.harness.bench.drivers.mpi_programs import OPENMPI, launcher
from holdfast.harness.bench.recovery.recovery import LIMIT, SETTLE, NotRecovered
from holdfast.harness.measure.noise import Noise
from holdfast.harness.measure.stats import Spread

HANGS_SECONDS = 10.0
"""Seconds without a recovery after which a job counts as hung."""


class PeerRecovery(msgspec.Struct, frozen=True):
    """Milliseconds of each kill from the signal to the survivors' next correct result, and their spread.

    `hung` counts the jobs that did not recover in time; `kills` and `total` leave them out.
    """

    library: str
    ranks: int
    nbytes: int
    others: float
    kills: tuple[float, ...]
    total: Spread
    hung: int


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """Rank `number` starts to reduce, in process `pid`."""

    number: int
    pid: int
    library: str


class RankRecovered(msgspec.Struct, frozen=True, tag=True):
    """The rank has reduced again, at `time` (CLOCK_MONOTONIC seconds)."""

    time: float


Message = RankReady | RankRecovered
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True, slots=True)
class _PeerProcess:
    ready: RankReady
    line: MessageSocket[Message]

    @staticmethod
    def accept(listener: socket.socket) -> _PeerProcess:
        line = MessageSocket(listener.accept()[0], _decoder)
        ready = line.receive(HANGS_SECONDS)
        assert isinstance(ready, RankReady)
        return _PeerProcess(ready, line)

    def end(self) -> None:
        self.line.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ready.pid, signal.SIGKILL)

    def recovered(self) -> float:
        """When it had reduced again (CLOCK_MONOTONIC seconds). Raises `NotRecovered` if it ended."""
        try:
            message = self.line.receive(HANGS_SECONDS)
        except ChannelClosed as error:
            text = f"rank {self.ready.number} of {self.ready.library} ended after a kill"
            raise NotRecovered(text) from error
        assert isinstance(message, RankRecovered)
        return message.time


def _kill_one(ranks: int, nbytes: int, victim: int, wait: float) -> tuple[str, float]:
    """Kill one rank of a job of its own; returns the library's name of itself, and the milliseconds."""
    with HeldDirectory("holdfast-ulfm-") as folder, HeldDirectory("holdfast-ulfm-", SHARED_MEMORY) as shared:
        how = launcher(OPENMPI, ranks, shared.path)
        address = str(folder.path / "socket")
        program = [sys.executable, "-m", "holdfast.harness.bench.recovery.peer", address, str(nbytes)]
        with contextlib.ExitStack() as left:
            listener = left.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
            bind_unix(listener, address)
            listener.listen(ranks)
            listener.settimeout(LIMIT)
            log = left.enter_context(private_file(folder.path / "log", "wb"))
            process = subprocess.Popen(
                [*how.words, "--with-ft", "ulfm", *program],
                env=os.environ | how.environment | {"TMPDIR": str(folder.path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            left.callback(_end, process)
            try:
                team = {}
                for _ in range(ranks):
                    rank = _PeerProcess.accept(listener)
                    left.callback(rank.end)
                    team[rank.ready.number] = rank
                time.sleep(wait)
                killed = time.monotonic()
                os.kill(team[victim].ready.pid, signal.SIGKILL)
                last = max(rank.recovered() for number, rank in team.items() if number != victim)
            except (OSError, EOFError) as error:
                raise NotRecovered(f"ranks of Open MPI did not come, or not back: {error}") from error
            return team[0].ready.library, 1e3 * (last - killed)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for mpirun to end, since its ranks have ended; signal its process group if it does not.

    It has then waited for its ranks, so their CPU time counts as ours.
    """
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
            return


def run(
    ranks: int, kills: int, nbytes: int = 64 * 1024, seed: int = 0, progress: Callable[[str], None] = lambda text: None
) -> PeerRecovery:
    """Kill one of `ranks` ranks in each of `kills` jobs.

    Raises RuntimeError without Open MPI, `NotRecovered` if more jobs hang than recover.
    """
    choose, taken, library, hung, noise = random.Random(seed), list[float](), "", 0, Noise()
    while len(taken) < kills:
        try:
            library, milliseconds = _kill_one(ranks, nbytes, choose.randrange(ranks), SETTLE * (1 + choose.random()))
        except NotRecovered:
            hung += 1
            if hung > kills:
                raise
            continue
        taken.append(milliseconds)
        progress(f"{len(taken)} of {kills} kills: {milliseconds:.1f} ms; {counted(hung, 'job')} hung")
    return PeerRecovery(library, ranks, nbytes, noise.cpus(), tuple(taken), Spread.of(taken), hung)


def _be_a_rank(address: str, nbytes: int) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    library = " ".join(MPI.Get_library_version().split(",")[0].split())
    given, out = np.full(max(1, nbytes // 4), comm.rank + 1, np.float32), np.empty(max(1, nbytes // 4), np.float32)
    with MessageSocket.dial(address, _decoder) as bench:
        bench.send(RankReady(comm.rank, os.getpid(), f"{library} ULFM"))
        try:
            while True:
                comm.Allreduce(given, out)
        except MPI.Exception:
            comm.Revoke()
        left = comm.Shrink()
        given[:] = left.rank + 1
        left.Allreduce(given, out)
        completed = time.monotonic()
        if (out != left.size * (left.size + 1) / 2).any():
            raise ArithmeticError(f"the Allreduce of {left.size} survivors is wrong")
        bench.send(RankRecovered(completed))
        with contextlib.suppress(ChannelClosed):
            bench.receive()  # until the bench has heard it and hangs up


if __name__ == "__main__":
    _be_a_rank(sys.argv[1], int(sys.argv[2]))
