"""Runs mpirun with a proxy in place of each rank, so that the ranks can be forked from the zygote.

mpirun starts a proxy for each rank (`mpirun_proxy`). A proxy sends the environment by which a process finds its place
in the MPI job; the rank is forked with that environment, and the proxy dies with it. So ranks start in milliseconds,
with this process's channel, and end with the zygote, while mpirun sees ordinary ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from holdfast.comms.errors import Unsupported
from holdfast.comms.system.paths import bind_unix
from holdfast.ft.console.units import counted
from holdfast.ft.launch import mpirun_proxy
from holdfast.ft.launch.held_directory import HeldDirectory, private_file
from holdfast.ft.launch.launcher import Launch, NoLaunch, StartFailed

_START_SECONDS = 60.0
_END_SECONDS = 5.0
_RANK = "PMIX_RANK"
_MOST = 1 << 20
_OF_MPIRUN = ("TMPDIR", "PWD", "OLDPWD", "SHLVL", "_")
"""Variables that a rank takes from this process and not from its proxy."""


def mpirun_path() -> str | None:
    """The path of Open MPI's `mpirun`: beside this Python, else on PATH; None if there is none."""
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def memory_in(folder: Path) -> list[str]:
    """The `mpirun` options that put the ranks' shared memory in `folder`: killed ranks leave their files behind."""
    return ["--mca", "btl_sm_backing_directory", str(folder)]


class MpiJob(Launch):
    """A running mpirun and the proxies of its ranks. Raises `StartFailed` if they do not start."""

    def __init__(self, size: int) -> None:
        program = mpirun_path()
        if program is None:
            raise StartFailed("there is no mpirun; pip install 'holdfast[mpi]'")
        super().__init__()
        self._folder = HeldDirectory("holdfast-mpi-")
        self._output = self._folder.path / "mpirun.log"
        self._proxies: dict[int, socket.socket] = {}
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                path = self._folder.path / "socket"
                bind_unix(listener, path)
                listener.listen(size)
                self._process = self._start(program, size, path)
                self._gather(listener, size)
        except BaseException:
            self.close()
            raise

    def _start(self, program: str, size: int, path: Path) -> subprocess.Popen[bytes]:
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        proxy = [sys.executable, "-I", "-S", str(mpirun_proxy.__file__), str(path)]
        options = ["--oversubscribe", "--bind-to", "none", "--with-ft", "ulfm", "-n", str(size)]
        options += memory_in(self._shared.path)
        with private_file(self._output, "wb") as output:
            return subprocess.Popen(
                [program, *as_root, *options, *proxy],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(self._folder.path)},
                start_new_session=True,
            )

    def _gather(self, listener: socket.socket, size: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        listener.settimeout(0.1)
        while len(self._proxies) < size:
            if self._process is None or self._process.poll() is not None:
                raise StartFailed(f"mpirun ended while starting: {self._said()}")
            if time.monotonic() > deadline:
                raise StartFailed(f"mpirun did not start {counted(size, 'process')} in time: {self._said()}")
            try:
                line, _ = listener.accept()
            except TimeoutError:
                continue
            line.settimeout(5.0)
            environ = _hear(line)
            rank = int(environ[_RANK])
            self._proxies[rank] = line
            new = {name: value for name, value in environ.items() if os.environ.get(name) != value}
            self._of_rank[rank] = {name: value for name, value in new.items() if name not in _OF_MPIRUN}

    def attach(self, rank: int, pidfd: int) -> None:
        """Let the proxy of `rank` end when the process `pidfd` ends."""
        socket.send_fds(self._proxies[rank], [b"!"], [pidfd])

    def close(self) -> None:
        """End the proxies, and with them mpirun, which removes the ranks' shared files. Idempotent."""
        for line in self._proxies.values():
            line.close()
        self._proxies.clear()
        process, self._process = self._process, None
        if process is not None:
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                if number is not None:
                    process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                    break
        self._folder.close()
        self._shared.close()

    def _said(self) -> str:
        return self._output.read_text(errors="replace").strip()[-2000:] or "it said nothing"


def _hear(line: socket.socket) -> dict[str, str]:
    """The environment that a proxy sends."""
    with line.makefile("rb") as file:
        text = file.readline(_MOST)
    if not text.endswith(b"\n"):
        raise StartFailed(f"a proxy of mpirun ended while starting, or sends more than {_MOST} bytes of environment")
    environ: dict[str, str] = json.loads(text)
    return environ


def launch(launcher: str, size: int) -> Launch:
    """Start the launcher of this name for `size` ranks. Raises `StartFailed`; `Unsupported` for an unknown name."""
    if not launcher:
        return NoLaunch()
    if launcher == "mpirun":
        return MpiJob(size)
    raise Unsupported(f"starting ranks with {launcher!r}", "start them yourself and call comms.connect in each")
