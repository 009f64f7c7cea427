"""Helpers of the checks: what a backend announces, two ranks of which one dies, what rounds leave behind."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.comms import Communicator
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import Capabilities
from holdfast.harness import LocalCluster, RankDied


def on_each_rank(body: Callable[[Communicator], None]) -> Callable[[LocalCluster], None]:
    """The check that runs `body` on each of the `ranks`."""

    def check(ranks: LocalCluster) -> None:
        ranks.run(body)

    check.__name__, check.__doc__, check.__module__ = body.__name__, body.__doc__, body.__module__
    return check


def outlived(backend: str, body: Callable[[Communicator], None], done: Path, timeout: float = 60.0) -> None:
    """Run `body` on two ranks, of which one is killed; the survivor creates the file `done` last."""
    with LocalCluster(2, backend, timeout=timeout) as cluster:
        outcomes = cluster.outcomes(body)  # `run` would end the survivor soon after the death
    errors = [outcome.error for outcome in outcomes if not isinstance(outcome.error, RankDied)]
    assert errors == [None], errors
    assert done.exists()


Held = dict[str, dict[str, str]]
"""What this process holds: its descriptors, threads and maps, each by a key of its own, with its name."""


def leaks(turn: Callable[[int], None], rounds: int, memory: str, warm_up: int = 2) -> list[str]:
    """What `rounds` calls of `turn(number)` leave behind in this process, by name; nothing if no kind grows.

    What a library makes once per process counts once: `warm_up` rounds come before the count, and one thing of each
    kind may still come later. Maps count if `memory` is in their names. Waits up to 5 s for what still ends.
    """
    for number in range(warm_up):
        turn(number)
    start = held(memory)
    for number in range(warm_up, warm_up + rounds):
        turn(number)
    deadline = time.monotonic() + 5.0
    while (found := _grown(start, held(memory), rounds)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def held(memory: str) -> Held:
    """The descriptors and threads of this process, and its maps with `memory` in their names."""
    python = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines() if memory in line]
    return {
        "descriptors": {fd.name: _target(fd) for fd in Path("/proc/self/fd").iterdir()},
        "threads": {task.name: python.get(task.name) or _named(task) for task in Path("/proc/self/task").iterdir()},
        "maps": {fields[0]: fields[-1] for fields in maps},
    }


def _grown(start: Held, now: Held, rounds: int) -> list[str]:
    """A line for each kind of which there are at least two more, with the names of the new ones."""
    found = []
    for kind, things in now.items():
        more = len(things) - len(start[kind])
        if more > 1:
            new = sorted(f"{key} ({name})" for key, name in things.items() if start[kind].get(key) != name)
            found.append(f"{more} {kind} more after {rounds} rounds: {', '.join(new)}")
    return found


def _target(fd: Path) -> str:
    """What a descriptor is open on, a socket with its addresses."""
    try:
        target = str(fd.readlink())
        if not target.startswith("socket:"):
            return target
        with socket.socket(fileno=os.dup(int(fd.name))) as copy:
            return f"{target} {copy.family.name} at {copy.getsockname()!r}"
    except OSError:
        return "closed meanwhile"


def _named(task: Path) -> str:
    """The name that the kernel has for a thread."""
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return "ended meanwhile"


def wait_for_files(*paths: Path, seconds: float = 10.0) -> None:
    """Return once all files are there, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.01)


def capabilities(backend: str) -> Capabilities:
    """The capabilities that the backend's plugin announces."""
    return registry().backend(backend).info.capabilities


def reduces(backend: str, dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in capabilities(backend).reduces.get("cpu", ())


def moves(backend: str, dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in capabilities(backend).moves.get("cpu", ())
