"""A number whose file another part of the program closed is left alone."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import Liveness, start_time, this_host, this_process
from support.programs.forked_programs import ForkedProgram

KINDS: dict[str, Callable[[], int]] = {
    "file": lambda: os.open(os.devnull, os.O_RDONLY),
    "memory": lambda: os.memfd_create("test"),
    "eventfd": lambda: os.eventfd(0),
    "pidfd": lambda: os.pidfd_open(os.getpid()),
    "socket": lambda: socket.socket().detach(),
}
OTHERS: dict[str, Callable[[], int]] = KINDS | {"pidfd": lambda: os.pidfd_open(os.getppid())}


def reused(number: int, other: str, tmp_path: Path) -> int:
    """Close `number` behind its owner's back, and open another file under it."""
    opened = OTHERS[other]() if other != "file" else os.open(tmp_path / "users", os.O_RDWR | os.O_CREAT)
    os.dup2(opened, number)
    os.close(opened)
    return number


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_names_another_file_is_neither_closed_nor_woken(kind: str, other: str, tmp_path: Path) -> None:
    owned = OwnedDescriptor(KINDS[kind]())
    assert owned.ours
    number = reused(owned, other, tmp_path)
    assert not owned.ours
    owned.wake()
    owned.close()
    os.fstat(number)
    if other == "eventfd":
        os.set_blocking(number, False)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(number)
    os.close(number)


def test_close_closes_once() -> None:
    owned = OwnedDescriptor(os.eventfd(0))
    owned.wake()
    assert os.eventfd_read(owned) == 1
    owned.close()
    again = OwnedDescriptor(os.eventfd(0))
    assert again == owned, "the number is free"
    owned.close()
    assert again.ours and not owned.ours
    again.close()


@pytest.mark.parametrize("other", [*OTHERS, "nothing"])
def test_a_living_process_is_not_dead_because_its_pidfd_was_closed(other: str, tmp_path: Path) -> None:
    """Its end is noticed all the same."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        liveness = Liveness([this_process(), Peer(this_host(), child.pid, start_time(child.pid))], rank=0)
        assert liveness.dead() == ()
        (pidfd,) = liveness._ranks
        if other == "nothing":
            os.close(pidfd)
        else:
            reused(pidfd, other, tmp_path)
        assert liveness.dead() == ()
        wake = OwnedDescriptor(os.eventfd(0))
        assert liveness.wait(wake, 0.01) and liveness.dead() == ()
        child.kill()
        child.wait()
        assert liveness.wait(wake, 10.0) and liveness.dead() == (1,)
        liveness.close()
        wake.close()
        if other != "nothing":
            os.close(pidfd)


DAEMON = """
import os, sys
import torch
from holdfast import comms

rank, backend, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
comm = comms.connect(backend, rank=rank, size=2, rendezvous=f"file://{folder}/meet", timeout=20)
comm.all_reduce(torch.ones(4))
comm.barrier()
if rank == 0:
    os.closerange(3, 4096)
files = [open(f"{folder}/{rank}.{number}", "w+b") for number in range(60)]
try:
    comm.all_reduce(torch.ones(300_000), timeout=20)
except comms.HoldfastError as error:
    assert rank == 1 or "the process is gone" not in str(error), error
comm.close()
for file in files:
    assert os.fstat(file.fileno()).st_size == 0
    file.write(b"x")
    file.close()
"""


@pytest.mark.parametrize("backend", ["shm", "ucx"])
def test_a_program_that_closes_all_numbers_keeps_its_own_files(backend: str, tmp_path: Path) -> None:
    """The communicator goes on, or ends with an error that blames no living rank; the process ends well."""
    with contextlib.ExitStack() as stack:
        arguments = [["daemon.py", str(rank), backend, str(tmp_path)] for rank in range(2)]
        ranks = [stack.enter_context(ForkedProgram(DAEMON, each, None, os.environ)) for each in arguments]
        for program in ranks:
            done = program.communicate(100.0)
            assert done.returncode == 0, done.stderr
