"""Validates our environments behind OpenEnv's server with `openenv validate`, and plays them there: make openenv."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openenv.cli.__main__ import app
from openenv.core import GenericEnvClient
from typer.testing import CliRunner

from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.rl.environments.client import EnvironmentPool
from holdfast.rl.environments.environment import Action
from holdfast.rl.environments.registry import environment_factory

SERVE = Path(__file__).parent / "serve.py"
ENVIRONMENTS = {"guess": "50", "arithmetic": "12"}
"""Each with an action."""
SEEDS = (0, 3, 7)


async def started(url: str) -> None:
    """Return once a session can begin."""
    async with EnvironmentPool([url], wait=300.0) as pool, pool.session() as session:
        await session.reset(0)


@contextmanager
def their_server(name: str) -> Iterator[str]:
    """The URL of OpenEnv's server of one of our environments."""
    with ReservedPort("127.0.0.1") as port:  # or a connection to it may become one to itself
        url = f"http://127.0.0.1:{port.number}"
        process = subprocess.Popen([sys.executable, SERVE, name, str(port.number)])
        try:
            asyncio.run(started(url))
            yield url
        finally:
            process.kill()
            process.wait()


def validated(url: str) -> str:
    """The criteria of `openenv validate` that the server meets."""
    report = json.loads(CliRunner().invoke(app, ["validate", "--url", url, "--json"]).stdout)["summary"]
    return f"{report['passed_count']} of {report['total_count']} {report['failed_criteria'] or ''}"


async def plays_as_here(name: str, text: str, url: str) -> bool:
    """Whether OpenEnv's client sees at its server what the environment says in this process."""
    here = environment_factory(name)()
    seen, wanted = [], []
    for seed in SEEDS:
        async with GenericEnvClient(base_url=url) as client:
            first, then = await client.reset(seed=seed), await client.step({"text": text})
        seen += [(each.observation["text"], each.reward, each.done) for each in (first, then)]
        wanted += [(each.text, each.reward, each.done) for each in (here.reset(seed), here.step(Action(text)))]
    return seen == wanted


def main() -> None:
    good = True
    for name, text in ENVIRONMENTS.items():
        with their_server(name) as url:
            criteria = validated(url)
            same = asyncio.run(plays_as_here(name, text, url))
        good = good and same and "[" not in criteria
        print(
            f"{name} at OpenEnv's server: `openenv validate` {criteria}; its client sees the same: {same}", flush=True
        )
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
