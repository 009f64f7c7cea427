"""A killed process leaves no shared memory: Python's resource tracker in its group outlives it, and removes it."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from holdfast.ft.launch.guardian import EXEC_SECONDS, is_tracker
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.child_process import ChildProcess, ExecutedProcess
from holdfast.ft.processes.process_group import end_group, members_of
from holdfast.ft.processes.zygote_client import zygote

SECONDS = 60.0


def hold_memory(channel: ProcessChannel) -> None:
    """Make shared memory, and have a child of this process make some too; tell the names, and wait."""
    own = SharedMemory(create=True, size=1)
    if os.fork() == 0:
        channel.send((own.name, SharedMemory(create=True, size=1).name))
    signal.pause()


PROGRAM = f"""
from __future__ import annotations
import os, signal, socket, sys
from multiprocessing.shared_memory import SharedMemory
from holdfast.ft.processes.channel import ProcessChannel
{inspect.getsource(hold_memory)}
hold_memory(ProcessChannel(socket.socket(fileno=int(sys.argv[1]))))
"""


def executed(output: Path) -> ChildProcess:
    return ExecutedProcess([sys.executable, "-c", PROGRAM], name="executed", output=output, environ={})


def forked(output: Path) -> ChildProcess:
    return zygote().spawn(hold_memory, name="forked", output=output)


@pytest.mark.parametrize("start", [executed, forked])
def test_the_group_of_a_killed_process_ends_with_its_memory(
    start: Callable[[Path], ChildProcess], tmp_path: Path
) -> None:
    process = start(tmp_path / "output")
    try:
        segments = [Path("/dev/shm", name) for name in process.channel.recv(SECONDS)]
        assert all(each.exists() for each in segments)
        assert len(members_of(process.pid)) == 3, "the process, its child, and their tracker"
        process.kill()
        process.wait(SECONDS)
        assert not members_of(process.pid)
        assert not [each for each in segments if each.exists()]
    finally:
        process.close()


def test_a_process_without_a_command_line_may_become_a_tracker_for_a_moment() -> None:
    """In the middle of an exec it has none, and nor has a zombie."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert is_tracker(pid, 0.0) and not is_tracker(pid, EXEC_SECONDS)
    os.waitpid(pid, 0)
    assert not is_tracker(pid, 0.0) and not is_tracker(os.getpid(), 0.0)


def test_no_process_is_killed_if_there_is_no_such_group() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    end_group(pid)
    assert members_of(pid) == set()
