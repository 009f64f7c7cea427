"""Starts the workers of a run as forks of the zygote, and watches their pidfds in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.harness.channel import Channel
from holdfast.harness.processes import Process, zygote

PRELOAD = (
    "transformers.models.llama.modeling_llama",
    "holdfast.rl.trainer",
    "holdfast.rl.generator",
    "holdfast.rl.holder",
)
"""Slow to import, so imported once."""


class ForkedWorker:
    """A process of a `ZygoteEngine`."""

    def __init__(self, process: Process, loop: asyncio.AbstractEventLoop, on_exit: Callable[[str], None]) -> None:
        self._process, self._loop, self._on_exit = process, loop, on_exit
        self._watched = True
        loop.add_reader(process.pidfd, self._exited)

    @property
    def name(self) -> str:
        return self._process.name

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL; nothing happens if it is gone."""
        self._process.kill()

    def close(self) -> None:
        """End the process if it still runs, and let go of it. Idempotent."""
        self._unwatch()
        self._process.close()

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._process.pidfd)

    def _exited(self) -> None:
        self._unwatch()
        exit_ = self._process.wait(5.0)
        self._on_exit("" if exit_.status == 0 else self._process.epitaph())


class ZygoteEngine:
    """Implements `holdfast.rl.engine.Engine`. Processes get `environ` on top of this one's environment, one torch
    thread each, and write their output to `logs`, by name.
    """

    def __init__(self, logs: Path, environ: Mapping[str, str]) -> None:
        self._logs, self._environ = logs, dict(environ)

    def warm_up(self) -> None:
        """Import what is slow to import; takes seconds the first time. Raises `StartFailed`."""
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


def _be(body: Callable[..., None], args: tuple[Any, ...], channel: Channel) -> None:
    """What a worker runs; the channel to its parent has done its duty."""
    channel.close()
    body(*args)
