"""Starts the ranks of one library on this machine: imports torch once, then forks (inproc: threads).

Run as a program: `python -m holdfast.harness.bench.collectives.launch CONTESTANT KEY DIRECTORY RANKS`. Ends when its
ranks have ended, with status 1 if one of them failed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from holdfast.comms.system.paths import url_of
from holdfast.harness.bench.collectives.worker import serve
from holdfast.harness.bench.drivers.driver import TIMEOUT, CopyDriver, LibraryDriver

HOLDFAST = "holdfast:"
"""Prefix of the names of our own contestants; the backend follows."""


def launcher_of(contestant: str) -> str:
    """The program that must start the ranks of this contestant together; "" if this one forks them."""
    if not contestant.startswith(HOLDFAST):
        return ""
    from holdfast.comms.plugins.registry import registry

    return registry().backend(contestant.removeprefix(HOLDFAST)).info.capabilities.launcher


def _driver(contestant: str, key: str, directory: Path, rank: int, ranks: int) -> LibraryDriver:
    meeting = directory / f"{key}.store"
    if contestant == "memcpy":
        return CopyDriver(rank, ranks)
    if contestant == "torch-gloo":
        from holdfast.harness.bench.drivers.gloo import GlooDriver

        return GlooDriver(meeting, rank, ranks)
    if contestant.startswith(HOLDFAST):
        from holdfast import comms
        from holdfast.harness.bench.drivers.holdfast import HoldfastDriver

        backend = contestant.removeprefix(HOLDFAST)
        return HoldfastDriver(
            comms.connect(backend, rank=rank, size=ranks, rendezvous=url_of("file", meeting), name=key, timeout=TIMEOUT)
        )
    raise ValueError(f"no such contestant: {contestant}")


def _rank(contestant: str, key: str, directory: Path, rank: int, ranks: int, give_way: Callable[[], object]) -> bool:
    """Serve as one rank until the bench stops it; False, with the traceback printed, if it failed."""
    try:
        serve(key, directory, _driver(contestant, key, directory, rank, ranks), give_way)
    except BaseException:
        traceback.print_exc()
        return False
    return True


def _in_threads(contestant: str, key: str, directory: Path, ranks: int) -> bool:
    outcomes: list[bool] = []

    def body(rank: int) -> None:
        outcomes.append(_rank(contestant, key, directory, rank, ranks, lambda: time.sleep(0)))

    threads = [threading.Thread(target=body, args=(rank,), name=f"holdfast-bench-{rank}") for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(outcomes)


def _in_processes(contestant: str, key: str, directory: Path, ranks: int) -> bool:
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            well = _rank(contestant, key, directory, rank, ranks, os.sched_yield)
            sys.stderr.flush()
            os._exit(0 if well else 1)
        children.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    return not any(statuses)


def main(contestant: str, key: str, directory: Path, ranks: int) -> int:
    """Run all ranks of `contestant`; returns the exit status."""
    if contestant != "memcpy":
        import torch

        torch.set_num_threads(1)
    if contestant.startswith(HOLDFAST):
        import holdfast.comms  # noqa: F401
    if launcher_of(contestant):
        return 0 if _rank(contestant, key, directory, int(os.environ["PMIX_RANK"]), ranks, os.sched_yield) else 1
    threaded = contestant == f"{HOLDFAST}inproc"
    return 0 if (_in_threads if threaded else _in_processes)(contestant, key, directory, ranks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
