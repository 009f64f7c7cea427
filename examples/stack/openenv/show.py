"""Validates our environments behind OpenEnv's server with `openenv validate`, and plays them there: make openenv."""

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

from openenv.cli.__main__ import app
from openenv.core import GenericEnvClient
from typer.testing import CliRunner

from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.rl.environments.environment import Action
from holdfast.rl.environments.registry import environment_factory

SERVE = Path(__file__).parent / "serve.py"
ENVIRONMENTS = {"guess": "50", "arithmetic": "12"}
"""Each with an action."""
SEEDS = (0, 3, 7)


@contextmanager
def their_server(name: str) -> Iterator[str]:
    """The URL of OpenEnv's server of one of our environments."""
    with ReservedPort("127.0.0.1") as port:  # or a connection to it may become one to itself
        process = subprocess.Popen([sys.executable, SERVE, name, str(port.number)])
        try:
            deadline = time.monotonic() + 300.0
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port.number), 1.0).close()
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port.number}"
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


async def plays_as_here(name: str, text: str, url: str) -> bool:
    """Whether OpenEnv's client sees at its server what the environment says in this process."""
    here = environment_factory(name)()
    same = True
    for seed in SEEDS:
        async with GenericEnvClient(base_url=url) as client:
            first, then = await client.reset(seed=seed), await client.step({"text": text})
        same = same and here.reset(seed).text == first.observation["text"]
        wanted = here.step(Action(text))
        same = same and (wanted.text, wanted.reward, wanted.done) == (then.observation["text"], then.reward, then.done)
    return same


def main() -> None:
    print(f"openenv {importlib.metadata.version('openenv')}: our environments at its server\n")
    row = "{:<12} {:<28} {}".format
    print(row("environment", "openenv validate", "its client"))
    good = True
    for name, text in ENVIRONMENTS.items():
        with their_server(name) as url:
            criteria = validated(url)
            same = asyncio.run(plays_as_here(name, text, url))
        good = good and same and "[" not in criteria
        print(row(name, criteria, "the same episodes" if same else "DIFFERENT"), flush=True)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
