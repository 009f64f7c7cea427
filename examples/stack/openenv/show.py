"""Validates our environments with `openenv validate`, and plays them by both clients at both servers: make openenv."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openenv.cli.__main__ import app
from openenv.core import GenericEnvClient
from typer.testing import CliRunner

from holdfast.rl.environments.client import EnvironmentPool
from holdfast.rl.environments.environment import Action
from holdfast.rl.environments.registry import environment_factory
from holdfast.rl.environments.server import EnvironmentServer

SERVE = Path(__file__).parent / "serve.py"
ENVIRONMENTS = {"guess": "50", "arithmetic": "12"}
"""Each with an action."""
SEEDS = (0, 3, 7)


@contextmanager
def their_server(name: str) -> Iterator[str]:
    """The URL of OpenEnv's server of one of our environments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVE, name, str(port)])
    try:
        deadline = time.monotonic() + 120.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def validated(url: str) -> str:
    """The criteria of `openenv validate` that the server meets."""
    report = json.loads(CliRunner().invoke(app, ["validate", "--url", url, "--json"]).stdout)
    failed = report["summary"]["failed_criteria"]
    return (
        f"{report['summary']['passed_count']} of {report['summary']['total_count']}{' ' * bool(failed)}{failed or ''}"
    )


async def by_their_client(url: str, text: str) -> list[Any]:
    seen: list[Any] = []
    for seed in SEEDS:
        async with GenericEnvClient(base_url=url) as client:
            result = await client.reset(seed=seed)
            seen.append(result.observation["text"])
            result = await client.step({"text": text})
            seen.append([result.observation["text"], result.reward, result.done])
    return seen


async def by_our_client(url: str, text: str) -> list[Any]:
    seen: list[Any] = []
    async with EnvironmentPool([url]) as pool:
        for seed in SEEDS:
            async with pool.session() as session:
                seen.append((await session.reset(seed)).text)
                result = await session.step(Action(text))
                seen.append([result.text, result.reward, result.done])
    return seen


async def played(name: str, text: str, theirs: str) -> bool:
    """Whether both clients see the same at both servers."""
    async with EnvironmentServer(environment_factory(name), name) as server:
        seen = [await by_our_client(server.url, text), await by_their_client(server.url.replace("ws", "http"), text)]
        seen += [await by_our_client(theirs, text), await by_their_client(theirs, text)]
    return all(each == seen[0] for each in seen)


def main() -> None:
    print(f"openenv {importlib.metadata.version('openenv')}: our environments at its server, and at ours\n")
    row = "{:<12} {:<28} {}".format
    print(row("environment", "openenv validate", "both clients at both servers"))
    good = True
    for name, text in ENVIRONMENTS.items():
        with their_server(name) as url:
            criteria = validated(url)
            same = asyncio.run(played(name, text, url))
        good = good and same and "[" not in criteria
        print(row(name, criteria, "the same episodes" if same else "DIFFERENT"), flush=True)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
