"""Are slow ranks on too few cores taken for dead? `python docs/experiments/evictions.py`.

Ranks that share too few cores work together while each in turn holds its interpreter for longer than the suspect time,
computes in several threads, or takes and touches much memory, and other processes compete for the cores all the time.
No rank dies, so every epoch after the first, and every process that is ended, is a false eviction.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from holdfast.ft import Session, Timeouts
from holdfast.ft.processes.zygote_start import die_with_parent
from holdfast.harness.cluster.local_cluster import LocalCluster

EVICTIONS = ("fenced", "evicted", "condemned", "stalled", "cut_off")
"""The events that must not happen."""
MEGABYTES = 256
"""How much memory a rank takes and touches at a time."""


@dataclass(frozen=True, slots=True)
class Evictions:
    """The result. `suspect` and `seconds` are those of the request.

    `rounds`: collectives done; `hogs`: how often ranks were made slow, by kind; `evictions`: the events that must not
    be; `epochs`: how many there were.
    """

    ranks: int
    cores: int
    seconds: float
    suspect: float
    rounds: int
    hogs: dict[str, int]
    epochs: int
    evictions: list[dict[str, Any]]


def hold_interpreter(seconds: float) -> None:
    """Sleep without letting go of the GIL."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def compute(seconds: float) -> None:
    """Keep three threads busy that compete for the interpreter."""

    def spin() -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pass

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    spin()
    for thread in threads:
        thread.join()


def take_memory(seconds: float) -> None:
    """Take memory and touch all of it, again and again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        torch.ones(MEGABYTES << 18)


HOGS: dict[str, Callable[[float], None]] = {
    "hold the interpreter": hold_interpreter,
    "compute": compute,
    "take memory": take_memory,
}


def work(session: Session, seconds: float, suspect: float, seed: int) -> tuple[int, dict[str, int]]:
    """Work with the other ranks, slowly now and then; returns the number of rounds and of each kind of slowness."""
    rounds, hogs = 0, Counter[str]()
    deadline = time.monotonic() + seconds
    for attempt in session.steps(1):
        with attempt:
            chance = random.Random(seed * 1000 + attempt.rank)
            over = torch.zeros(1)
            while not over.item():
                over.fill_(time.monotonic() >= deadline)
                attempt.comm.all_reduce(over)
                rounds += 1
                if chance.random() < 0.02:
                    name = chance.choice(list(HOGS))
                    hogs[name] += 1
                    HOGS[name](chance.uniform(0.5, 2.5) * suspect)
    return rounds, dict(hogs)


def compete(count: int) -> list[int]:
    """Start processes that only compute, and end with this one; returns their ids."""
    parent, started = os.getpid(), []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            while True:
                pass
        started.append(pid)
    return started


def measure(seconds: float, ranks: int = 8, cores: int = 2, suspect: float = 0.5, seed: int = 0) -> Evictions:
    """Run for `seconds` on `cores` cores of this machine, and count. Raises ValueError for what cannot be run."""
    available = os.sched_getaffinity(0)
    if not 0 < cores <= len(available):
        raise ValueError(f"cores={cores}: this process may use {len(available)}")
    if seconds <= 0 or ranks < 2:
        raise ValueError(f"seconds={seconds} must be positive, ranks={ranks} at least 2")
    timeouts = Timeouts(heartbeat=suspect / 5, suspect=suspect, operation=60.0, rebuild=20.0, join=60.0)
    os.sched_setaffinity(0, set(sorted(available)[:cores]))
    competitors: list[int] = []
    try:
        with LocalCluster(ranks, "shm", threads=1, echo=False, session={"timeouts": timeouts}) as cluster:
            job = cluster.start(_on_cores, sorted(available)[:cores], seconds, suspect, seed)
            job.view()
            competitors = compete(2)
            results = job.results(timeout=seconds + 300.0)
            events = job.events()
    finally:
        for pid in competitors:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        os.sched_setaffinity(0, available)
    hogs = sum((Counter(slow) for _, slow in results), Counter[str]())
    return Evictions(
        ranks=ranks,
        cores=cores,
        seconds=seconds,
        suspect=suspect,
        rounds=min(rounds for rounds, _ in results),
        hogs=dict(hogs),
        epochs=len({event["epoch"] for event in events if event["kind"] == "rebuilt"}),
        evictions=[event for event in events if event["kind"] in EVICTIONS],
    )


def _on_cores(
    session: Session, cores: list[int], seconds: float, suspect: float, seed: int
) -> tuple[int, dict[str, int]]:
    os.sched_setaffinity(0, set(cores))
    return work(session, seconds, suspect, seed)


def main() -> int:
    """Print what was counted; status 1 if a rank was evicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--suspect", type=float, default=0.5, help="seconds of silence before a rank is looked at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = measure(asked.seconds, asked.ranks, asked.cores, asked.suspect, asked.seed)
    if asked.json:
        print(json.dumps(asdict(found)))
    else:
        slow = ", ".join(f"{name} {count}" for name, count in sorted(found.hogs.items()))
        print(f"{len(found.evictions)} false evictions, {found.epochs} epoch(s), {found.rounds} rounds; slow: {slow}")
        print(*found.evictions, sep="\n")
    return 1 if found.evictions or found.epochs != 1 else 0


if __name__ == "__main__":
    raise SystemExit(main())
