"""Starts the workers of a run as forks of the zygote, and watches their pidfds in the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.ft.detectors.process_watch import fatal_signal, open_threads_of
from holdfast.ft.launch.exit_status import how_it_ended
from holdfast.harness.processes.channel import ProcessChannel
from holdfast.harness.processes.zygote_client import ForkedProcess, zygote

PRELOAD = (
    "transformers.models.llama.modeling_llama",
    "holdfast.rl.roles.trainer",
    "holdfast.rl.roles.generator",
    "holdfast.rl.roles.holder",
)
"""Modules that are slow to import, so the zygote imports them once."""

_LOOKS = (0.05, 0.2, 1.0, 5.0)
"""Seconds between looks for a worker's threads, until it has several."""


class ForkedWorker:
    """A process of a `ZygoteEngine`."""

    def __init__(self, process: ForkedProcess, loop: asyncio.AbstractEventLoop, on_exit: Callable[[str], None]) -> None:
        self._process, self._loop, self._on_exit = process, loop, on_exit
        self._watched, self._dying = True, False
        loop.add_reader(process.pidfd, self._exited)
        self._threads: tuple[int, ...] = ()
        self._following = loop.call_later(_LOOKS[0], self._follow_threads, _LOOKS[1:])

    @property
    def name(self) -> str:
        return self._process.name

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL. Does nothing if the process is gone."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process if it still runs, and release it. Idempotent."""
        self._unwatch()
        if self._dying:  # the kernel has not freed it yet
            self._loop.run_in_executor(None, self._process.close)
        else:
            self._process.close()

    def _follow_threads(self, later: tuple[float, ...]) -> None:
        """Follow a second thread too: the kernel reports its end 20 to 190 ms before that of a killed process."""
        self._threads = open_threads_of(self._process.pid)
        for fd in self._threads:
            self._loop.add_reader(fd, self._thread_ended, fd)
        if not self._threads and later:
            self._following = self._loop.call_later(later[0], self._follow_threads, later[1:])

    def _thread_ended(self, fd: int) -> None:
        """If the process was killed, report its end now; otherwise wait for its exit status."""
        self._loop.remove_reader(fd)
        number = fatal_signal(self._process.pid)
        if number:
            self._unwatch()
            self._dying = True
            self._on_exit(f"process {self.pid} {how_it_ended(-number)}")

    def _unwatch(self) -> None:
        self._following.cancel()
        for fd in self._threads:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._threads = ()
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._process.pidfd)

    def _exited(self) -> None:
        self._unwatch()
        exit_ = self._process.wait(5.0)
        self._on_exit("" if exit_.status == 0 else self._process.epitaph())


class ZygoteEngine:
    """Implements `holdfast.rl.roles.engine.Engine`.

    Processes get `environ` on top of this one's environment, one torch thread each, and write their output to `logs`,
    by name.
    """

    def __init__(self, logs: Path, environ: Mapping[str, str]) -> None:
        self._logs, self._environ = logs, dict(environ)

    def warm_up(self) -> None:
        """Import `PRELOAD` in the zygote; takes seconds the first time. Raises `StartFailed`."""
        zygote().preload(*PRELOAD)

    def start(self, name: str, body: Callable[..., None], *args: Any, on_exit: Callable[[str], None]) -> ForkedWorker:
        """See `Engine.start`."""
        process = zygote().spawn(
            partial(_be, body, args),
            name=name,
            output=self._logs / f"{name}.log",
            threads=1,
            environ=self._environ,
        )
        return ForkedWorker(process, asyncio.get_running_loop(), on_exit)


def _be(body: Callable[..., None], args: tuple[Any, ...], channel: ProcessChannel) -> None:
    """The body of a worker. Closes the channel to its parent, which it does not need."""
    channel.close()
    # the kernel reports the end of this second thread at once
    threading.Thread(target=threading.Event().wait, name="worker-idle", daemon=True).start()
    body(*args)
