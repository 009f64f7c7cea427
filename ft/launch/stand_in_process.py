"""The process that mpirun starts in place of a rank: it sends its environment, and ends with the rank.

`python -I -S mpirun_proxy.py SOCKET`: standard library only, starts in milliseconds. mpirun takes this process for the
rank, so it must end when the rank ends, and by SIGKILL, which mpirun takes for a failure. It also ends when the server
of SOCKET is gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys


def main(path: str) -> None:
    """Send the environment, receive a descriptor of the rank's process, and wait for its end or the server's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        folder, _, name = path.rpartition("/")
        os.chdir(folder)  # the path may be longer than a socket address allows
        line.connect(name)
        line.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
        _, fds, _, _ = socket.recv_fds(line, 1, 1)
        if fds:
            poll = select.poll()
            poll.register(fds[0], select.POLLIN)
            poll.register(line, select.POLLIN)
            poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
