"""Kill a process group, but for Python's resource trackers in it: they remove what the killed processes leave.

A tracker ends by itself once no process is left that uses it, and then unlinks the shared memory (`/dev/shm/psm_*`) and
the semaphores which those processes made. Killed with them it would leave all of it behind.
"""

from __future__ import annotations

import os
import signal
import time

from holdfast.comms.transport.liveness import read_proc_stat
from holdfast.ft.launch.guardian import EXEC_SECONDS, is_tracker

TRACKER_SECONDS = 5.0
"""How long trackers may take to remove what is left."""

_PAUSE_SECONDS = 0.005


def kill_group(group: int) -> None:
    """SIGKILL to all processes of the group but its resource trackers. No effect if there is no such group."""
    killed: set[int] = set()
    began = time.monotonic()
    while True:
        members, seconds = members_of(group), time.monotonic() - began
        spared = {pid for pid in members if is_tracker(pid, seconds)}
        if not spared:
            _kill_all(group)
            return
        for pid in members - spared - killed:
            _kill(pid, group)
        if members <= spared | killed and all(is_tracker(pid, EXEC_SECONDS) for pid in spared):
            return
        killed |= members - spared  # the next look finds what they have forked meanwhile


def end_group(group: int) -> None:
    """End the rest of a group, after its leader was reaped. Returns once its trackers have ended too.

    They are killed after `TRACKER_SECONDS`.
    """
    deadline = time.monotonic() + TRACKER_SECONDS
    while _exists(group) and members_of(group):  # zombies that are not reaped are in the group, too
        if time.monotonic() < deadline:
            kill_group(group)
            time.sleep(_PAUSE_SECONDS)
        else:
            _kill_all(group)
            return


def members_of(group: int) -> set[int]:
    """The processes of a group that have not ended."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and _group_of(int(entry.name)) == group:
            found.add(int(entry.name))
    return found


def _group_of(pid: int) -> int:
    """The group of a process; 0 if it has ended."""
    state, _, group, *_ = read_proc_stat(pid) or (b"X", b"", b"")
    return 0 if state in b"ZX" else int(group)


def _kill(pid: int, group: int) -> None:
    """SIGKILL to a process that is still of this group: its number may be another's by now."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _group_of(pid) == group:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _kill_all(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
