"""One run: its first process, which is ours and waits, and the process that executes the code.

The first process of a space of process numbers cannot be signalled from within, and the kernel kills all the others
when it ends. It has given up every right before it forks, and alone holds the descriptor of the report.

Stops: fork bombs, daemons, one process that takes all memory, descriptors or time, and forged reports of the end.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import resource
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast.rl.environments.sandbox.inside import namespaces, seccomp
from holdfast.rl.environments.sandbox.inside.execute import execute

STARTED = b"started\n"


@dataclass(frozen=True, slots=True)
class Inherited:
    """What the template gives to each run: descriptors of /proc and of itself, and its size."""

    proc: int
    template: int
    address_space: int


def be_first_process(here: Inherited, limits: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    """Put up the inner walls, let a child execute the program, and report how that ended."""
    report = fds[-1]
    ended: dict[str, float | str]
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        namespaces.enter_inner(here.proc, limits["disk_bytes"])
        namespaces.die_with_parent()
        poll = select.poll()
        poll.register(here.template, select.POLLIN)
        if poll.poll(0):
            os._exit(1)  # the template died before the kernel was asked to tell
        namespaces.drop_capabilities()
        seccomp.install(platform.machine())
        os.write(report, STARTED)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _execute(here, limits, fds)
        status = _wait(child)
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = {"status": status, "seconds": time.monotonic() - began, "cpu_seconds": spent.ru_utime + spent.ru_stime}
    except OSError as error:
        ended = {"failed": str(error.filename or "start"), "errno": error.errno or 0}
    os.write(report, json.dumps(ended).encode())
    os._exit(0)


def _wait(child: int) -> int:
    """Wait for the child, then end and reap all that it has left."""
    status = None
    while status is None:
        pid, found = os.waitpid(-1, 0)
        status = found if pid == child else None
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return status


def _execute(here: Inherited, limits: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    code = 125
    try:
        program, *streams, _ = (fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in fds)
        for place, fd in enumerate(streams):
            os.dup2(fd, place)
        text = os.pread(program, os.fstat(program).st_size, 0)
        os.closerange(4, 1 << 20)
        os.chdir("/tmp")
        os.environ.clear()
        os.environ.update(HOME="/tmp", TMPDIR="/tmp", PATH="", LANG="C.UTF-8")
        _limit(here, limits)
        code = execute(json.loads(text))
    finally:
        os._exit(code)


def _limit(here: Inherited, limits: Mapping[str, Any]) -> None:
    seconds = math.ceil(limits["cpu_seconds"])
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + 1),
        (resource.RLIMIT_SIGPENDING, 64),
        (resource.RLIMIT_AS, here.address_space + limits["memory_bytes"]),
    ):
        resource.setrlimit(kind, (most, most))
    # SIGXCPU first, which says why; SIGKILL for code that ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
