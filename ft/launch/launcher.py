"""Programs that must start the ranks of a backend together (`Capabilities.launcher`): none, or mpirun.

mpirun starts a proxy for each rank, so that the ranks can be forked from the zygote. A proxy sends the environment by
which a process finds its place in the MPI job; the rank is forked with that environment, and the proxy dies with it. So
ranks start in milliseconds, with this process's channel, and end with the zygote, while mpirun sees ordinary ranks.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.ft.console.units import counted
from holdfast.ft.control.event_loop import LoopThread
from holdfast.ft.launch.held_directory import SHARED_MEMORY, HeldDirectory, private_file
from holdfast.ft.launch.process_proxies import ProcessProxy, ProxyServer, proxy_command


class StartFailed(HoldfastError):
    """A process could not be started."""


class Launch:
    """A running launcher, here for backends that need none. The caller starts the ranks, with its environment.

    Shared memory of the backends' libraries is in a directory of its own, removed by `close`: a rank that is killed
    while UCX or Open MPI makes a segment leaves the file of it.
    """

    def __init__(self) -> None:
        self._shared = HeldDirectory("holdfast-ranks-", SHARED_MEMORY)
        self._of_rank: dict[int, dict[str, str]] = {}

    def environ(self, rank: int) -> dict[str, str]:
        """The variables to add to the environment of the process of `rank`."""
        own = self._of_rank.get(rank, {})
        if SHARED_MEMORY is None or "UCX_POSIX_DIR" in os.environ:
            return own
        return {"UCX_POSIX_DIR": str(self._shared.path), **own}

    def attach(self, rank: int, pidfd: int) -> None:
        """Tie the process `pidfd` to `rank`: the launcher sees its end as the end of the rank that it started."""

    def close(self) -> None:
        """End the launcher and all processes that it started. Idempotent."""
        self._shared.close()


def how_it_ended(code: int) -> str:
    """How a process ended, in words; `code` is negative for a signal, as in `subprocess`."""
    if code >= 0:
        return f"exited with status {code}"
    known = {each.value: each.name for each in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


_START_SECONDS = 60.0
_END_SECONDS = 5.0
_RANK = "PMIX_RANK"
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
        self._arrivals: queue.SimpleQueue[ProcessProxy] = queue.SimpleQueue()
        self._proxies: dict[int, ProcessProxy] = {}
        self._watched: list[OwnedDescriptor] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = LoopThread("holdfast-mpirun")
        self._server = ProxyServer(self._arrivals.put)
        try:
            self._thread.run(self._server.start(), _START_SECONDS)
            self._process = self._start(program, size)
            self._gather(self._process, size)
        except BaseException:
            self.close()
            raise

    def _start(self, program: str, size: int) -> subprocess.Popen[bytes]:
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        options = ["--oversubscribe", "--bind-to", "none", "--with-ft", "ulfm", "-n", str(size)]
        options += memory_in(self._shared.path)
        with private_file(self._output, "wb") as output:
            return subprocess.Popen(
                [program, *as_root, *options, sys.executable, *proxy_command("", self._server.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(self._folder.path)},
                start_new_session=True,
            )

    def _gather(self, process: subprocess.Popen[bytes], size: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while len(self._proxies) < size:
            if process.poll() is not None:
                raise StartFailed(f"mpirun ended while starting: {self._said()}")
            if time.monotonic() > deadline:
                raise StartFailed(f"mpirun did not start {counted(size, 'process')} in time: {self._said()}")
            with contextlib.suppress(queue.Empty):
                there = self._arrivals.get(timeout=0.1)
                rank = int(there.environ[_RANK])
                self._proxies[rank] = there
                new = {name: value for name, value in there.environ.items() if os.environ.get(name) != value}
                self._of_rank[rank] = {name: value for name, value in new.items() if name not in _OF_MPIRUN}

    def attach(self, rank: int, pidfd: int) -> None:
        """End the proxy of `rank` when the process `pidfd` ends: by SIGKILL, which mpirun takes for a failure."""
        watched = OwnedDescriptor(os.dup(pidfd))
        self._watched.append(watched)
        loop, proxy = self._thread.loop, self._proxies[rank]

        def ended() -> None:
            loop.remove_reader(watched)
            proxy.end(-signal.SIGKILL)

        loop.call_soon_threadsafe(loop.add_reader, watched, ended)

    def close(self) -> None:
        """End the proxies, and with them mpirun, which removes the ranks' shared files. Idempotent."""
        if self._thread.alive:
            self._thread.run(self._server.close(), _END_SECONDS)
            self._thread.close()
        while self._watched:
            self._watched.pop().close()
        process, self._process = self._process, None
        if process is not None:
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                if number is not None:
                    process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                    break
        self._folder.close()
        super().close()

    def _said(self) -> str:
        return self._output.read_text(errors="replace").strip()[-2000:] or "it said nothing"


def launch(launcher: str, size: int) -> Launch:
    """Start the launcher of this name for `size` ranks. Raises `StartFailed`; `Unsupported` for an unknown name."""
    if not launcher:
        return Launch()
    if launcher == "mpirun":
        return MpiJob(size)
    raise Unsupported(f"starting ranks with {launcher!r}", "start them yourself and call comms.connect in each")
