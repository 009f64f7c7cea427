"""How close is a recovery to the least that its means allow? `python docs/experiments/recovery_bound.py`.

The ranks are processes that only meet at flags in shared memory. They import no torch, so the kernel frees a dead one
in a moment. Each has a thread that follows the others' pidfds; when one ends, the lowest survivor compares-and-sets the
epoch in an sqlite file, and sets a word that ends what is pending. There are no views, no membership, no reasons, no
other machine, no tensors: the time that holdfast takes beyond this bound is the price of those.

Kills of holdfast's ranks and of these take turns. With `--one` the program is a single job of the bound.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import select
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from holdfast.ft.processes.zygote_start import die_with_parent
from holdfast.harness.bench.command import RecoveryPlan

LIMIT = 10.0
"""Seconds after which a job that has not recovered never will."""

_EPOCH, _LOST = 0, 1  # words of the first line: the newest epoch, and the rank that is not in it
_PID, _AT, _DONE = 0, 1, 2  # words of a rank's line; _DONE: when it first met the others in a later epoch (ns)
_LINE, _ROUNDS = 8, 1 << 40
_LOOKS = 20


def kill_one(ranks: int, victim: int, wait: float) -> float:
    """Milliseconds from the kill of `victim` in a job of its own to the survivors' next meeting.

    The kill is `wait` seconds after the start. Raises RuntimeError if they do not meet again.
    """
    program = [sys.executable, sys.argv[0], "--one", str(ranks), str(victim), str(wait)]
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=wait + 3 * LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError("the least recovery did not end") from error
    if done.returncode:
        raise RuntimeError(f"the least recovery failed: {done.stderr.strip()[-500:]}")
    return float(done.stdout)


class _BoundProcess:
    """One process of the job, over `words`, which all of them share."""

    def __init__(self, rank: int, words: memoryview, register: Path) -> None:
        self._rank, self._words, self._members = rank, words, list(range(len(words) // _LINE - 1))
        self._db = sqlite3.connect(register, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA synchronous=OFF")
        words[_line(rank) + _PID] = os.getpid()
        while not all(words[_line(member) + _PID] for member in self._members):
            time.sleep(0.001)
        threading.Thread(target=self._watch, daemon=True).start()

    def live(self) -> None:
        """Meet the others for ever, and note the time of the first meeting in a later epoch."""
        words, mine = self._words, _line(self._rank)
        epoch = 1
        while True:
            for number in range(1, _ROUNDS):
                if not self._meet(epoch * _ROUNDS + number, epoch):
                    break
                if epoch > 1 and not words[mine + _DONE]:
                    words[mine + _DONE] = time.monotonic_ns()
            epoch = words[_EPOCH]
            self._members = [member for member in self._members if member != words[_LOST]]

    def _meet(self, at: int, epoch: int) -> bool:
        words = self._words
        words[_line(self._rank) + _AT] = at
        for member in self._members:
            looks = 0
            while words[_line(member) + _AT] < at:
                if words[_EPOCH] > epoch:
                    return False
                looks += 1
                if looks > _LOOKS:
                    time.sleep(0)
        return True

    def _watch(self) -> None:
        poll, followed = select.poll(), {}
        for member in self._members:
            if member != self._rank:
                fd = os.pidfd_open(self._words[_line(member) + _PID])
                followed[fd] = member
                poll.register(fd, select.POLLIN)
        dead = followed[poll.poll()[0][0]]
        if self._rank == min(member for member in self._members if member != dead):
            done = self._db.execute("UPDATE cell SET epoch = 2, lost = ? WHERE epoch = 1", (dead,))
            if done.rowcount == 1:
                self._words[_LOST] = dead
                self._words[_EPOCH] = 2


def _line(rank: int) -> int:
    return (rank + 1) * _LINE


def _run(ranks: int, victim: int, wait: float) -> float:
    with (
        mmap.mmap(-1, 8 * _LINE * (ranks + 1)) as memory,
        tempfile.TemporaryDirectory(prefix="holdfast-bound-") as folder,
    ):
        register = Path(folder) / "register"
        with sqlite3.connect(register) as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("CREATE TABLE cell(epoch INTEGER NOT NULL, lost INTEGER NOT NULL)")
            db.execute("INSERT INTO cell VALUES (1, -1)")
        db.close()
        with memoryview(memory).cast("q") as words:
            words[_EPOCH], words[_LOST] = 1, -1
            pids = [_fork(rank, words, register) for rank in range(ranks)]
            try:
                return _kill(pids, victim, words, wait)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _fork(rank: int, words: memoryview, register: Path) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            _BoundProcess(rank, words, register).live()
        finally:
            os._exit(1)
    return pid


def _kill(pids: list[int], victim: int, words: memoryview, wait: float) -> float:
    time.sleep(wait)
    survivors = [rank for rank in range(len(pids)) if rank != victim]
    killed = time.monotonic_ns()
    os.kill(pids[victim], signal.SIGKILL)
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        time.sleep(0.1)
        done = [words[_line(rank) + _DONE] for rank in survivors]
        if all(done):
            return (max(done) - killed) / 1e6
    raise RuntimeError(f"the survivors did not meet again within {LIMIT} s")


def main() -> None:
    """Measure both in turns, and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--one", nargs=3, help="one job of the bound: ranks, victim, seconds before the kill")
    asked = parser.parse_args()
    if asked.one:
        print(_run(int(asked.one[0]), int(asked.one[1]), float(asked.one[2])))
        return
    from holdfast.harness.bench import recovery  # torch, which the processes of the bound must not have

    ours, least, choose = list[float](), list[float](), random.Random(0)
    for seed in range(asked.kills):
        ours.append(recovery.run(RecoveryPlan(asked.backend, asked.ranks, kills=1, seed=seed)).total.median)
        least.append(kill_one(asked.ranks, choose.randrange(asked.ranks), 0.2 * (1 + choose.random())))
    whole, bound = statistics.median(ours), statistics.median(least)
    print(
        f"holdfast {whole:.2f} ms, the least {bound:.2f} ms: {whole / bound:.2f} times as long (medians of {len(ours)})"
    )


if __name__ == "__main__":
    main()
