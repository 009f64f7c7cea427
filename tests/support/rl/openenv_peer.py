"""A program for the interpreter of `make extra-openenv`: OpenEnv's own client, which plays the guessing game.

openenv_peer.py play SEED,SEED URL...       prints the hints and the reward of each episode at each server as JSON
openenv_peer.py steps SECONDS TASKS URL...   prints the steps per second at each server, in turns
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from openenv.core import GenericEnvClient


async def episode(env: GenericEnvClient, seed: int) -> tuple[list[str], float]:
    result = await env.reset(seed=seed, episode_id=f"e{seed}")
    texts, low, high = [result.observation["text"]], 1, 100
    while not result.done:
        middle = (low + high) // 2
        result = await env.step({"text": str(middle)})
        texts.append(result.observation["text"])
        low, high = (middle + 1, high) if texts[-1] == "higher" else (low, middle - 1)
    return texts, result.reward


async def play(url: str, seeds: list[int]) -> dict[str, Any]:
    async with GenericEnvClient(base_url=url) as env:
        episodes = [await episode(env, seed) for seed in seeds]
        state = await env.state()
        try:
            await env.step({"text": "1"})
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
        case ["play", seeds, *urls]:
            print(json.dumps([asyncio.run(play(url, [int(seed) for seed in seeds.split(",")])) for url in urls]))
        case ["steps", seconds, tasks, *urls]:
            print(json.dumps([asyncio.run(steps(url, float(seconds), int(tasks))) for url in urls]))
