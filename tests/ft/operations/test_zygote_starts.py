"""Zygotes that are started before anything slow, or forked from a process that has torch; and process groups that end.

A killed process leaves no shared memory: Python's resource tracker in its group outlives it, and removes it.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from holdfast.ft.launch.guardian import EXEC_SECONDS, is_tracker
from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.child_process import ChildProcess, ExecutedProcess
from holdfast.ft.processes.process_group import end_group, members_of
from holdfast.ft.processes.zygote_client import call_in_fork, inherit_zygote, zygote, zygote_pid
from support.waiting import eventually

SECONDS = 60.0


def _open_files() -> set[str]:
    links = (each for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return {str(each.readlink()) for each in links}


def _facts(secret: str) -> tuple[int, int, bool]:
    return os.getpid(), os.getppid(), secret in _open_files()


def _call_through_a_forked_zygote(folder: Path) -> tuple[int, int | None, tuple[int, int, bool]]:
    with (folder / "open").open("w") as secret:
        inherit_zygote()
        facts = partial(_facts, secret.name)
        return os.getpid(), zygote_pid(), call_in_fork(facts, name="inner", output=folder / "inner", timeout=SECONDS)


def test_a_fork_forks_its_own_zygote_which_has_nothing_of_it_open(tmp_path: Path) -> None:
    call = partial(_call_through_a_forked_zygote, tmp_path)
    pid, own, (inner, parent, sees) = call_in_fork(call, name="outer", output=tmp_path / "outer", timeout=SECONDS)
    assert own not in (None, zygote_pid()) and parent == own and inner not in (pid, own)
    assert not sees, "a descriptor of the process is open in what its zygote forks"


def _wait_beside_a_forked_zygote(channel: ProcessChannel) -> None:
    inherit_zygote()
    source = zygote()
    child = source.spawn(_sleep, name="inner", output=Path(os.devnull))
    channel.send((source.pid, child.pid))
    _sleep(channel)


def _sleep(channel: ProcessChannel) -> None:
    channel.recv(SECONDS)


def test_nothing_outlives_the_parent_of_a_forked_zygote(tmp_path: Path) -> None:
    process = zygote().spawn(_wait_beside_a_forked_zygote, name="outer", output=tmp_path / "outer")
    try:
        pids: tuple[int, int] = process.channel.recv(SECONDS)
        process.kill()
        assert process.wait(10.0).signal == signal.SIGKILL
        for pid in pids:
            eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists(), 10.0)
    finally:
        process.close()


def _with_a_thread() -> tuple[bool, int | None]:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        return inherit_zygote(), zygote_pid()
    finally:
        ended.set()
        thread.join()


def test_no_zygote_is_forked_from_a_process_with_threads(tmp_path: Path) -> None:
    forked = call_in_fork(_with_a_thread, name="outer", output=tmp_path / "outer", timeout=SECONDS)
    assert forked == (False, None)


def _exit() -> None:
    os._exit(3)


def _refuse() -> None:
    raise KeyError("no such thing")


def test_a_call_in_a_fork_raises_what_the_function_raised_and_says_how_its_process_ended(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no such thing"):
        call_in_fork(_refuse, name="a call", output=tmp_path / "call", timeout=SECONDS)
    with pytest.raises(StartFailed, match=r"a call ended without an answer: process .* exited with status 3"):
        call_in_fork(_exit, name="a call", output=tmp_path / "call", timeout=SECONDS)


def _run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


EARLY = """
import sys
from holdfast.ft.processes import zygote_start
zygote_start.start_early("colorsys")
print("torch" in sys.modules, zygote_start._early.process.pid)
"""

TAKEN = """
from pathlib import Path
from holdfast.ft.processes.zygote_client import call_in_fork
from holdfast.ft.processes.zygote_client import zygote_pid
has = call_in_fork(lambda: "colorsys" in sys.modules, name="call", output=Path("/dev/null"), timeout=60)
print(zygote_pid(), has)
"""


def test_a_zygote_that_is_started_early_is_the_one_that_is_used_and_ends_with_its_parent() -> None:
    heavy, early, used, has = _run(EARLY + TAKEN)
    assert (heavy, has) == ("False", "True") and early == used
    unused = _run(EARLY)
    assert unused[0] == "False"
    assert not any(Path(f"/proc/{pid}").exists() for pid in (early, unused[1]))


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
