"""Environment servers in processes of their own, and environments that misbehave."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.environments.registry import register
from holdfast.rl.environments.session import EnvironmentSession
from support.children import Child


class ServerProcess(AbstractContextManager["ServerProcess"]):
    """A process that serves an environment, until its context ends. Kill it, or start it again at the same port."""

    def __init__(self, name: str) -> None:
        self._name, self._port = name, 0
        self.start()

    def start(self) -> None:
        """Start it, or start it again after `kill`; returns when it serves."""
        self.process = Child(_serve, self._name, self._port)
        self.url = self.process.hear()
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.pipe.close()

    def __exit__(self, *_: object) -> None:
        self.kill()


def _serve(pipe: Connection, name: str, port: int) -> None:
    from holdfast.rl.environments.server import serve

    os.closerange(3, pipe.fileno())  # the connections of the test
    os.closerange(pipe.fileno() + 1, 65536)
    register("misbehaving", Misbehaving)
    asyncio.run(serve(name, "127.0.0.1", port, on_start=pipe.send))


async def guess(session: EnvironmentSession, seed: int) -> list[Any]:
    """Play `guess` by bisection: the texts and the last reward."""
    observation = await session.reset(seed)
    texts, low, high = [observation.text], 1, 100
    while not observation.done:
        middle = (low + high) // 2
        observation = await session.step(str(middle))
        texts.append(observation.text)
        low, high = (middle + 1, high) if observation.text == "higher" else (low, middle - 1)
    return [texts, observation.reward]


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
