"""The parent of a rank: runs a command, and kills all its descendants, however it or the launcher ends.

`python -I -S guardian.py FD tied|detached COMMAND...` writes to the pipe FD the command's pid, and at its end its wait
status, a line each. It is the subreaper of all that the command starts, new sessions and daemons included. It kills
what is left of them when the command ends, when its own parent is gone (unless it is detached), or at SIGUSR1. It
forwards SIGTERM, SIGINT, SIGHUP and SIGCONT to the command's process group. It imports nothing of holdfast: it has to
start fast, and may not fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # of prctl
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT)
END = signal.SIGUSR1
REAP_MILLISECONDS = 1000
TRACKER_SECONDS, KILL_SECONDS = 2.5, 5.0
EXEC_SECONDS = 0.1
"""How long an exec may leave a process without a command line."""


def run(status: int, command: list[str], *, tied: bool) -> None:
    """Run `command` until its end, then kill its descendants; write pid and wait status to descriptor `status`.

    If it is `tied`, the end of this process's parent ends it too.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(status, False)
    parent, me = os.getppid(), os.getpid()
    launcher = os.pidfd_open(parent)
    if os.getppid() != parent:
        return
    handled = {*FORWARDED, END}
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    pid = os.fork()
    if pid == 0:
        _become(command, me, prctl)
    with contextlib.suppress(PermissionError):  # the child has already set its group and run the command
        os.setpgid(pid, pid)
    ended: list[int] = []
    for number in FORWARDED:
        signal.signal(number, lambda got, _: _signal_group(pid, got))
    signal.signal(END, lambda *_: ended.append(pid))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    _say(status, pid)
    poll, child = select.poll(), os.pidfd_open(pid)
    if tied:
        poll.register(launcher, select.POLLIN)
    poll.register(child, select.POLLIN)
    while not ended and not poll.poll(REAP_MILLISECONDS):
        _reap_others(pid)
    with contextlib.suppress(PermissionError):
        os.kill(pid, signal.SIGKILL)  # it is not reaped yet, so the number is its own
    with contextlib.suppress(BrokenPipeError):
        _say(status, _kill_all(pid))


def _say(status: int, number: int) -> None:
    """Write a line. It is short enough for a pipe to take it whole or not at all."""
    os.write(status, f"{number}\n".encode())


def _become(command: list[str], guardian: int, prctl: ctypes._NamedFuncPointer) -> NoReturn:
    """Execute the command in a new process group, with default signals; the guardian's death kills it."""
    try:
        os.setpgid(0, 0)
        prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == guardian:
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _reap_others(pid: int) -> None:
    """Reap orphaned descendants of the command while the command runs."""
    with contextlib.suppress(ChildProcessError):
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (found := os.waitid(os.P_ALL, 0, options)) is not None and found.si_pid != pid:
            os.waitpid(found.si_pid, 0)


def _kill_all(pid: int) -> int:
    """Kill all descendants until none is left; returns the command's wait status.

    Python's resource trackers end by themselves after them: they remove what is left in shared memory.
    """
    status, began = 0, time.monotonic()
    while (seconds := time.monotonic() - began) < KILL_SECONDS:
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                status = found[1] if found[0] == pid else status
        except ChildProcessError:
            break
        for victim in descendants(os.getpid()):
            if seconds > TRACKER_SECONDS or not is_tracker(victim, seconds):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(victim, signal.SIGKILL)
        time.sleep(0.001)
    return status


def is_tracker(pid: int, seconds: float) -> bool:
    """Whether a process is one of Python's resource trackers; or may become one, `seconds` after it was first seen.

    In the middle of an exec it has no command line yet.
    """
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"multiprocessing.resource_tracker" in command if command else seconds < EXEC_SECONDS


def descendants(pid: int) -> list[int]:
    """The pids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((Path(entry.path) / "stat").read_bytes().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            found.append(child)
            todo.append(child)
    return found


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[3:], tied=sys.argv[2] == "tied")
