"""Environment servers in processes of their own, and environments that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from holdfast.rl.environments.environment import Action, Environment, Observation
from support.source_tree import TESTS

T = TypeVar("T")

PROGRAM = """
import asyncio, sys
from holdfast.rl.environments.serve import serve
from support.rl.environment_servers import register_bad_ones
register_bad_ones()
name, port, sessions, lease, timeout = sys.argv[1:]
asyncio.run(serve(name, "127.0.0.1", int(port), sessions=int(sessions), lease=float(lease), timeout=float(timeout),
                  on_start=lambda url: print(url, flush=True)))
"""


class ServerProcess:
    """A process that serves an environment. Kill it, stop it, or start it again at the same port."""

    def __init__(self, name: str, sessions: int = 64, lease: float = 60.0, timeout: float = 30.0) -> None:
        self._arguments = [str(sessions), str(lease), str(timeout)]
        self.name, self.port = name, 0
        self.start()

    def start(self) -> None:
        """Start it, or start it again after `kill`; returns when it serves."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, self.name, str(self.port), *self._arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the server did not start"
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> None:
        """SIGSTOP: it takes connections, as the kernel does that, and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def server_process(name: str, **options: Any) -> Iterator[ServerProcess]:
    """A server in a process of its own, killed on leaving."""
    server = ServerProcess(name, **options)
    try:
        yield server
    finally:
        server.kill()


def run(body: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
    """Run a test's coroutine; fails if it takes too long, or leaves tasks behind."""

    async def whole() -> T:
        async with asyncio.timeout(seconds):
            result = await body
        for _ in range(500):
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            if not left:
                return result
            await asyncio.sleep(0.01)
        raise AssertionError(f"left behind: {left}")

    return asyncio.run(whole())


class Misbehaving(Environment):
    """Counts steps, and does something wrong at the word for it. `release` ends the calls that hang."""

    release = threading.Event()

    def __init__(self, at_reset: str = "") -> None:
        self._at_reset = at_reset
        self._steps = 0

    def reset(self, seed: int) -> Observation:
        self._steps = 0
        return self._behave(self._at_reset)

    def step(self, action: Action) -> Observation:
        self._steps += 1
        return self._behave(action.text)

    def _behave(self, how: str) -> Observation:
        text = str(self._steps)
        answers: dict[str, Callable[[], Any]] = {
            "raise": lambda: 1 / 0,
            "exit": lambda: sys.exit("bye"),
            "die": lambda: os._exit(3),
            "hang": lambda: self.release.wait(60.0),
            "nothing": lambda: None,
            "dict": lambda: {"text": "fine"},
            "nan": lambda: Observation(text=text, reward=float("nan")),
            "infinite": lambda: Observation(text=text, reward=float("-inf")),
            "reward in words": lambda: Observation(text=text, reward="much"),  # type: ignore[arg-type]
            "done in words": lambda: Observation(text=text, done="yes"),  # type: ignore[arg-type]
            "bytes": lambda: Observation(text=b"bytes"),  # type: ignore[arg-type]
            "object": lambda: Observation(text=text, fields={"what": object()}),
            "huge": lambda: Observation(text="x" * (2 << 20)),
            "end": lambda: Observation(text=text, reward=1.0, done=True),
        }
        return answers[how]() if how in answers else Observation(text=text, reward=0.5)


LIES = ("nothing", "dict", "nan", "infinite", "reward in words", "done in words", "bytes")


def register_bad_ones() -> None:
    """Register the environments of this file."""
    from holdfast.rl.environments.registry import register

    register("misbehaving", Misbehaving)
