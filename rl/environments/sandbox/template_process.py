"""The template process as the job sees it: started once, asked for runs, replaced when it is gone."""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.rl.environments.sandbox.inside import syscalls
from holdfast.rl.environments.sandbox.limits import SandboxUnavailable

START_TIMEOUT: Final = 60.0
FORK_TIMEOUT: Final = 30.0
"""Seconds that the template may take to fork a run, on a machine that is busy."""

_FOLDER = Path(__file__).resolve().parent
_BOOTSTRAP = """
import sys, types
for name in ("holdfast", "holdfast.rl", "holdfast.rl.environments", sys.argv[1]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[2]]
from holdfast.rl.environments.sandbox.inside.template import main
main(int(sys.argv[3]), int(sys.argv[4]))
"""
"""Imports the modules of `inside` by their names, without the packages above them, which load torch."""


class TemplateDied(Exception):
    """The template process is gone, or does not answer."""


@dataclass(frozen=True, slots=True)
class ForkedRun:
    """A run that has begun: its first process."""

    pid: int
    pidfd: OwnedDescriptor


class TemplateProcess:
    """A running template. One thread at a time may use it. Raises SandboxUnavailable if the walls cannot stand."""

    def __init__(self) -> None:
        if sys.platform != "linux" or os.uname().machine not in syscalls.AUDIT:
            raise SandboxUnavailable(
                f"it is built of Linux namespaces on {' and '.join(syscalls.AUDIT)}", "run it on such a machine"
            )
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        job = os.pidfd_open(os.getpid())
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", _BOOTSTRAP),
                    *(__package__, str(_FOLDER), str(theirs.fileno()), str(job)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
                cwd="/",
                pass_fds=(theirs.fileno(), job),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(job)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait_until_ready(self) -> None:
        self._channel.settimeout(START_TIMEOUT)
        try:
            answer = self._channel.recv(4096)
        except OSError as error:
            raise SandboxUnavailable(
                f"its template process did not start ({error})", "look for a machine without memory or processors left"
            ) from error
        if not answer:
            raise SandboxUnavailable(
                f"its template process ended with status {self._process.wait()}",
                f"see what `{sys.executable} -S -c 'import json'` says",
            )
        if found := json.loads(answer):
            raise unavailable(str(found["failed"]), int(found["errno"]))

    def fork(self, limits: dict[str, float], fds: Sequence[int]) -> ForkedRun:
        """Begin a run that owns copies of the descriptors. Raises TemplateDied."""
        self._channel.settimeout(FORK_TIMEOUT)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        received = array.array("i")
        try:
            self._channel.sendmsg([json.dumps(limits).encode()], rights)
            answer, ancillary, _, _ = self._channel.recvmsg(256, socket.CMSG_SPACE(4))
            for _, _, packed in ancillary:
                received.frombytes(packed)
            return ForkedRun(int(answer), OwnedDescriptor(received[0]))
        except (OSError, ValueError, IndexError) as error:
            raise TemplateDied(str(error) or "it closed its socket") from error

    def close(self) -> None:
        """Kill the template; the kernel kills all of its runs."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


_SWITCHES = (
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


def unavailable(step: str, number: int) -> SandboxUnavailable:
    """The error for a step of the set-up that failed, with what would allow it."""
    missing = f"{step} failed: {os.strerror(number)}"
    if number == errno.ENOSYS:
        return SandboxUnavailable(missing, "it needs Linux 5.14 or later")
    for path, off, command in _SWITCHES:
        with suppress(OSError):
            if Path(path).read_text().strip() == off:
                return SandboxUnavailable(missing, f"as root, allow user namespaces: {command}")
    return SandboxUnavailable(
        missing,
        "in a container, allow user namespaces and mounts (docker run --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --cap-add SYS_ADMIN), or run it outside of the container",
    )
