"""OpenEnv 0.10 itself: its client at our server, our client at its server, whose program is the example's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")

from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.rl.environments.client import EnvironmentClient, EnvironmentPool
from holdfast.rl.environments.environment import Action
from holdfast.rl.errors import EnvironmentBusy, EnvironmentDied, EnvironmentRefused
from support.rl.environment_servers import guess, server_process
from support.rl.event_loop import run
from support.source_tree import ROOT, TESTS

PEER = ROOT / ".venv" / "extras" / "openenv" / "bin" / "python"
PROGRAM = TESTS / "support" / "rl" / "openenv_peer.py"
SERVE = ROOT / "examples" / "stack" / "openenv" / "serve.py"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not PEER.exists(), reason="openenv is not installed: make extra-openenv"),
]
SEEDS = [0, 3, 7, 11]


def ask_peer(*arguments: str) -> Any:
    """What the peer's program prints."""
    done = subprocess.run([PEER, PROGRAM, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def started() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server of OpenEnv that begins to start, and its URL."""
    with ReservedPort("127.0.0.1") as port:
        process = subprocess.Popen([PEER, SERVE, "guess", str(port.number)])
        try:
            yield process, f"http://127.0.0.1:{port.number}"
        finally:
            process.kill()
            process.wait(30.0)


async def played(url: str) -> list[Any]:
    """Episodes of our client, which waits until the server has started."""
    async with EnvironmentPool([url], wait=90.0) as pool, pool.session() as session:
        return [await guess(session, seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def openenv_server() -> Iterator[str]:
    """The URL of a server of OpenEnv."""
    with started() as (_, url):
        run(played(url), 100.0)
        yield url


def test_both_clients_play_the_same_episodes_at_both_servers(openenv_server: str) -> None:
    with server_process("guess") as server:
        ours = [run(played(url)) for url in (openenv_server, server.url)]
        theirs = ask_peer("play", ",".join(map(str, SEEDS)), openenv_server, server.url)
    assert all(each == ours[0] for each in [*ours, *[said["episodes"] for said in theirs]])
    for said in theirs:
        assert said["state"]["episode_id"] == f"e{SEEDS[-1]}"
        assert said["state"]["step_count"] == len(said["episodes"][-1][0]) - 1
    assert "EPISODE_OVER" in theirs[1]["after"], "openenv's own server steps on"


async def test_openenvs_refusals_are_typed(openenv_server: str) -> None:
    async with EnvironmentClient(openenv_server) as client:
        await client.reset(0)
        with pytest.raises(EnvironmentRefused, match="VALIDATION_ERROR"):
            await client.step(Action(fields={"number": 1}))
    clients = [EnvironmentClient(openenv_server) for _ in range(9)]
    failed = 0
    for client in clients:
        try:
            await client.reset(0)
        except EnvironmentBusy:
            failed += 1
    for client in clients:
        await client.close()
    assert failed == 1, "it has eight places"


async def test_a_death_of_openenvs_server_ends_our_session() -> None:
    with started() as (process, url):
        async with EnvironmentPool([url], wait=90.0) as pool, pool.session() as session:
            await session.reset(3)  # waits for the start
            process.kill()
            with pytest.raises(EnvironmentDied):
                await session.step("1")


@pytest.mark.timeout(300)
def test_ours_is_as_fast_as_openenv(openenv_server: str) -> None:
    """Interleaved, with OpenEnv's client on both sides: the servers differ."""
    with server_process("guess") as server:
        first, ours, again, ours_again = ask_peer("steps", "1", "4", *[openenv_server, server.url] * 2)
        ratios = [ours / first, ours_again / again]
    print(f"steps/s of our server / openenv's, by openenv's client: {', '.join(f'{each:.2f}' for each in ratios)}")
    assert max(ratios) > 0.9
