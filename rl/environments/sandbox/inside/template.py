"""The template process, a warm interpreter behind the outer walls, and the runs that it forks.

It takes one request a datagram: the limits, and the descriptors that the run may have. It answers with the number of
the run's first process and a pidfd of it. When the job's process ends, whatever ends it, so do the template and its
runs.

The first process of a run is ours and waits for the one that executes the code. The first process of a space of process
numbers cannot be signalled from within, and the kernel kills all the others when it ends. It has given up every right
before it forks, and alone holds the descriptor of the report.

Stops: fork bombs, daemons, one process that takes all memory, descriptors or time, and forged reports of the end.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import gc
import importlib
import json
import linecache
import math
import os
import platform
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast.rl.environments.sandbox.inside import namespaces, seccomp

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
        code = execute(text.decode())
    finally:
        os._exit(code)


FILE = "<solution>"
"""Of a program, in its tracebacks."""


def execute(code: str) -> int:
    """Execute a program in a module of its own. Returns the exit status.

    Nothing here is trusted once the program has begun: it shares this interpreter.
    """
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = [FILE]
    module = types.ModuleType("__main__")
    for name in [name for name in sys.modules if name.split(".")[0] == "holdfast"]:
        del sys.modules[name]
    sys.modules[module.__name__] = module
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    status = _shielded(lambda: exec(compile(code, FILE, "exec"), module.__dict__))
    ending = _shielded(_end)
    return status or ending


def _end() -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()


def _shielded(body: Any) -> int:
    """Run a function; print its exception as the interpreter does. Returns the exit status."""
    try:
        body()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


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


REQUEST_BYTES = 4096
DESCRIPTORS = 6
"""Of a request: program, stdin, stdout, stderr, value, report."""

_WARM = """
    abc argparse array ast asyncio base64 bisect bz2 calendar cmath collections collections.abc contextlib copy csv
    ctypes dataclasses datetime decimal enum fractions functools hashlib heapq inspect io itertools json linecache
    logging lzma math numbers operator os pathlib pprint queue random re secrets sqlite3 ssl statistics string struct
    sys tempfile textwrap threading time timeit traceback types typing unicodedata unittest unittest.mock
    uuid warnings weakref xml.etree.ElementTree zlib zoneinfo
"""
"""Imported before the walls are up: afterwards their shared libraries cannot be found. Every run has them at once."""


def main(control: int, job: int) -> None:
    """Serve requests from the socket `control` until it closes or the process behind the pidfd `job` is gone."""
    channel = socket.socket(fileno=control)
    try:
        here = _enter(job)
    except OSError as error:
        channel.send(json.dumps({"failed": str(error.filename or "start"), "errno": error.errno or 0}).encode())
        return
    channel.send(b"{}")
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(job, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if job in ready or not _serve(channel, here):
            return


def _enter(job: int) -> Inherited:
    namespaces.use_one_arena()
    for name in _WARM.split():
        with suppress(ImportError):
            importlib.import_module(name)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    library = [folder for folder in sys.path if os.path.isdir(folder)]  # noqa: PTH112 - a text is wanted
    outermost = [folder for folder in library if not any(folder.startswith(other + "/") for other in library)]
    namespaces.enter_outer(proc, outermost)
    if not all(os.access(folder, os.R_OK | os.X_OK) for folder in outermost):
        raise PermissionError(13, "the interpreter's library is not readable", outermost[0])
    me = os.pidfd_open(os.getpid())
    statm = os.open("self/statm", os.O_RDONLY, dir_fd=proc)
    address_space = int(os.read(statm, 200).split()[0]) * os.sysconf("SC_PAGE_SIZE")
    os.close(statm)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; the job's process holds a pidfd
    os.close(0)
    seccomp.program(platform.machine())  # every run finds it made
    gc.collect()
    gc.freeze()
    return Inherited(proc, me, address_space)


def _serve(channel: socket.socket, here: Inherited) -> bool:
    """Fork one run. False once the channel is closed."""
    data, ancillary, _, _ = channel.recvmsg(REQUEST_BYTES, socket.CMSG_SPACE(4 * DESCRIPTORS))
    fds = array.array("i")
    for _, _, packed in ancillary:
        fds.frombytes(packed)
    if not data:
        return False
    pid, pidfd = namespaces.fork_first_process()
    if pid == 0:
        channel.close()
        be_first_process(here, json.loads(data), fds)
    for fd in fds:
        os.close(fd)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))]
    channel.sendmsg([str(pid).encode()], rights)
    os.close(pidfd)
    return True
