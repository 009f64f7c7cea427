"""The process that a foreign launcher (mpirun, Monarch's host) starts in place of one that is forked here.

`python -I -S proxy_program.py SOCKET TOKEN`: standard library only, starts in milliseconds. It sends the token and
its environment over the Unix socket (by default that of `VARIABLE`), and ends as it is told: with a status, or by the
signal of a negative one. The launcher takes it for the process, so it ends by SIGKILL when the server is gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import NoReturn

VARIABLE = "HOLDFAST_FORK_SOCKET"
"""The variable with the path of the Unix socket, for proxies that are not told it by their command."""

SECONDS = 60.0


def main(path: str, token: str) -> NoReturn:
    """Send token and environment, and end as the answer says."""
    folder, _, name = path.rpartition("/")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(SECONDS)
        within = os.open(folder, os.O_PATH)  # the path may be longer than a socket address allows
        line.connect(f"/proc/self/fd/{within}/{name}")
        os.close(within)
        line.sendall(json.dumps([token, dict(os.environ)]).encode() + b"\n")
        line.settimeout(None)
        status = int(line.recv(64) or -signal.SIGKILL)
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


if __name__ == "__main__":
    main(sys.argv[1] or os.environ[VARIABLE], sys.argv[2])
