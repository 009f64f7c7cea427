"""What mpirun starts in place of a rank: it hands its environment over, and lives for as long as the rank does.

`python -I -S mpirun_proxy.py SOCKET`: standard library only, up in milliseconds. mpirun takes this process for the
rank, so it must end when the rank ends, and in a way that says "failed": by SIGKILL. It ends too when whoever serves
SOCKET is gone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys


def main(path: str) -> None:
    """Send the environment, receive a descriptor of the rank's process, wait for the end of either side."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        folder, _, name = path.rpartition("/")
        os.chdir(folder)  # a path may be longer than an address
        line.connect(name)
        data = json.dumps(dict(os.environ)).encode()
        line.sendall(len(data).to_bytes(8, "little") + data)
        _, fds, _, _ = socket.recv_fds(line, 1, 1)
        if fds:
            poll = select.poll()
            poll.register(fds[0], select.POLLIN)
            poll.register(line, select.POLLIN)
            poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
