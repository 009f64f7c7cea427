"""The program that runs the workers of torchstore as actors of Monarch, and all processes that it starts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast.ft.launch.guardian import descendants
from holdfast.ft.launch.held_directory import private_file
from holdfast.harness.bench.store.drivers import torchstore_home
from holdfast.harness.bench.store.team_plan import TeamPlan

GONE_SECONDS = 15.0
"""Seconds that actors and storage volumes may take to end once their program has: they free shared memory."""


class ActorsProgram:
    """The running program; its workers dial the socket in `folder`."""

    def __init__(self, plan: TeamPlan, folder: Path, shared: Path, output: Path) -> None:
        module = [sys.executable, "-m", "holdfast.harness.bench.store.torchstore_actors"]
        with private_file(output, "ab") as stream:
            self._process = subprocess.Popen(
                [*module, str(plan.publishers), str(plan.readers), str(folder), str(shared)],
                env={**os.environ, **_environment(plan)},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def failed(self) -> bool:
        """Whether the program ended with an error."""
        return bool(self._process.poll())

    def close(self, timeout: float) -> None:
        """Wait for the end of the program, then kill it; wait until all that it started has ended."""
        with contextlib.ExitStack() as left:
            actors = []
            for pid in descendants(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    actors.append(os.pidfd_open(pid))
                    left.callback(os.close, actors[-1])
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(GONE_SECONDS)
            deadline = time.monotonic() + GONE_SECONDS
            for actor in actors:
                poller = select.poll()
                poller.register(actor, select.POLLIN)
                if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                    signal.pidfd_send_signal(actor, signal.SIGKILL)


def _environment(plan: TeamPlan) -> dict[str, str]:
    """What the program needs: the packages of torchstore after ours, threads, and quiet logs."""
    homes = [str(plan.torchstore_source), *(str(path) for path in torchstore_home().glob("lib/*/site-packages"))]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (*homes, os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": str(plan.threads),
        "TORCHSTORE_LOG_LEVEL": "ERROR",
        "MONARCH_FILE_LOG": "error",
        "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "910737418240",
    }
