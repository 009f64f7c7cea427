"""Find what a test session leaves behind: processes, threads, descriptors, shared memory.

Counts what belongs to this process and its children, and shared memory that no process uses, so that other sessions on
the machine do not disturb it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.ft.launch.held_directory import MARKER

LASTING = ("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/")
"""Kinds of descriptors that count: they can keep another process waiting or memory alive."""

OF_CUDA = ("socket:", "pipe:", "anon_inode:[eventfd]")
"""Kinds of descriptors that the CUDA driver opens, also later than at its start, and keeps until the process ends."""

SHARED_MEMORY = Path("/dev/shm")
OURS = ("holdfast", "torch_", "ucx", "sm_segment", "vader_segment", "psm_", "sem.", "vllm_dist_")
"""Prefixes of the names that holdfast and its libraries give to shared memory."""


def restore_signals() -> None:
    """React to the signals that shells and nohup ignore for jobs in the background; programs of tests inherit that."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


_exempt: set[tuple[int, str]] = set()


def exempt_descriptors_since(before: Snapshot) -> None:
    """Count no descriptor as left behind that was opened since `before`: a library keeps it until the process ends."""
    _exempt.update(set(descriptors().items()) - before.descriptors)


def monarch_listeners() -> set[str]:
    """The sockets on which Monarch waits for processes: it keeps that of one which ended before it had connected."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {
        f"socket:[{fields[6]}]"
        for fields in lines
        if len(fields) == 8 and fields[3] == "00010000" and re.fullmatch("@[A-Za-z0-9]{20,28}", fields[7])
    }


def children_of(process: int) -> list[int]:
    """The direct children of a process, zombies too; none of one that has ended."""
    found = list[int]()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def children() -> dict[int, str]:
    """The direct children of this process (zombies too), with their command lines."""
    return {pid: _command(pid) for pid in children_of(os.getpid())}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip() or "(zombie)"
    except OSError:
        return "(gone)"


def threads() -> set[threading.Thread]:
    """The threads that must be joined: ours, and all that are not daemons."""
    return {
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and (not thread.daemon or thread.name.startswith("holdfast-"))
    }


def descriptors() -> dict[int, str]:
    """This process's open descriptors that count, and what they are."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith(LASTING):
                found[int(entry.name)] = target
    return found


def shared_memory() -> set[Path]:
    """The files and folders in /dev/shm that could be ours."""
    return {path for path in SHARED_MEMORY.iterdir() if path.name.startswith(OURS)} if SHARED_MEMORY.is_dir() else set()


def _in_use(path: Path) -> bool:
    """True if a living process has the file, or one in the folder, open or mapped.

    The maker of a semaphore has it mapped under another name, but with the same number.
    """
    try:
        mapped = re.compile(rf"{re.escape(str(path))}| {path.stat().st_ino} +{SHARED_MEMORY}/")
    except FileNotFoundError:  # it is gone meanwhile
        return True
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if mapped.search((process / "maps").read_text()):
                    return True
                if any(fd.readlink().is_relative_to(path) for fd in (process / "fd").iterdir()):
                    return True
    return False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What exists at one moment; `left_behind` compares it with now."""

    children: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    shared_memory: frozenset[Path]

    @staticmethod
    def take() -> Snapshot:
        return Snapshot(
            frozenset(children()), frozenset(threads()), frozenset(descriptors().items()), frozenset(shared_memory())
        )

    def left_behind(self, patience: float = 2.0) -> list[str]:
        """One line for each new thing; waits up to `patience` seconds for what still ends."""
        found = settle(self.living, patience)
        gc.collect()
        return found + settle(self._descriptors, patience)

    def files_left_behind(self, patience: float = 2.0) -> list[str]:
        """One line for each new piece of shared memory that no living process uses, whichever process made it."""
        return settle(self._unused, patience)

    def _unused(self) -> list[str]:
        """Leaves out the folder of a killed program, which may be of another session: the next program removes it."""
        new = [path for path in shared_memory() - self.shared_memory if not (path / MARKER).is_file()]
        return [f"shared memory: {path}" for path in new if not _in_use(path)]

    def living(self) -> list[str]:
        """One line for each new process and thread; cheap."""
        new = [f"process {pid}: {command}" for pid, command in children().items() if pid not in self.children]
        return new + [f"thread {thread.name}" for thread in threads() - self.threads]

    def kill_children(self, but: int | None) -> None:
        """Kill each new process, so that the tests that follow have the machine for themselves."""
        for pid in children().keys() - self.children - {but}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _descriptors(self) -> list[str]:
        known = self.descriptors | _exempt
        new = [(fd, what) for fd, what in descriptors().items() if (fd, what) not in known]
        kept = monarch_listeners() if new else set()
        not_counted = OF_CUDA if torch.cuda.is_initialized() else ()
        return [f"descriptor {fd}: {what}" for fd, what in new if what not in kept and not what.startswith(not_counted)]


def settle(look: Callable[[], list[str]], patience: float) -> list[str]:
    """What `look` finds once it finds nothing, or after `patience` seconds."""
    deadline = time.monotonic() + patience
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
