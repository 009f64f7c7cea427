"""A program for the interpreter of `make extra-openenv`: OpenEnv's own server or client, with a guessing game.

openenv_peer.py serve PORT
openenv_peer.py play SEED,SEED URL...       prints the hints and the reward of each episode at each server as JSON
openenv_peer.py steps SECONDS TASKS URL...   prints the steps per second at each server, in turns
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import ConcurrencyConfig, create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""
    turns_left: int = 0


class GuessEnvironment(Environment[Guess, Hint, State]):
    """The rules of holdfast's `guess`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret, self._state = 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._secret, self._state = random.Random(seed).randint(1, 100), State(episode_id=episode_id)
        return Hint(text="guess a number from 1 to 100", turns_left=7)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        left = 7 - self._state.step_count
        if action.number == self._secret:
            return Hint(text="right", turns_left=left, done=True, reward=1.0)
        hint = "higher" if action.number < self._secret else "lower"
        return Hint(text=hint, turns_left=left, done=left == 0, reward=0.0)

    @property
    def state(self) -> State:
        return self._state


async def episode(env: GenericEnvClient, seed: int) -> tuple[list[str], float]:
    result = await env.reset(seed=seed, episode_id=f"e{seed}")
    texts, low, high = [result.observation["text"]], 1, 100
    while not result.done:
        middle = (low + high) // 2
        result = await env.step({"number": middle})
        texts.append(result.observation["text"])
        low, high = (middle + 1, high) if texts[-1] == "higher" else (low, middle - 1)
    return texts, result.reward


async def play(url: str, seeds: list[int]) -> dict[str, Any]:
    async with GenericEnvClient(base_url=url) as env:
        episodes = [await episode(env, seed) for seed in seeds]
        state = await env.state()
        try:
            await env.step({"number": 1})
            after = "no error"
        except RuntimeError as error:
            after = str(error)
    return {"episodes": episodes, "state": state, "after": after}


async def steps(url: str, seconds: float, tasks: int) -> float:
    done = 0

    async def one(task: int) -> None:
        nonlocal done
        async with GenericEnvClient(base_url=url) as env:
            end, seed = time.perf_counter() + seconds, task * 100_000
            while time.perf_counter() < end:
                done += len((await episode(env, seed))[0]) - 1
                seed += 1

    begun = time.perf_counter()
    await asyncio.gather(*[one(task) for task in range(tasks)])
    return done / (time.perf_counter() - begun)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", port]:
            limits = ConcurrencyConfig(max_concurrent_envs=8)
            app = create_fastapi_app(GuessEnvironment, Guess, Hint, concurrency_config=limits)
            uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
        case ["play", seeds, *urls]:
            print(json.dumps([asyncio.run(play(url, [int(seed) for seed in seeds.split(",")])) for url in urls]))
        case ["steps", seconds, tasks, *urls]:
            print(json.dumps([asyncio.run(steps(url, float(seconds), int(tasks))) for url in urls]))
