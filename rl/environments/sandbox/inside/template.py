"""The template process: a warm interpreter behind the outer walls, which forks each run.

It takes one request a datagram: the limits, and the descriptors that the run may have. It answers with the number of
the run's first process and a pidfd of it. When the job's process ends, whatever ends it, so do the template and its
runs.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import platform
import select
import signal
import socket
import sys
from contextlib import suppress

from holdfast.rl.environments.sandbox.inside import namespaces, seccomp
from holdfast.rl.environments.sandbox.inside.run import Inherited, be_first_process

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
