"""Other systems beside our environments: tools over MCP, and OpenEnv 0.10, its client at our server and ours at its."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mcp", reason="pip install 'holdfast[mcp]'")
pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")

from holdfast.ft.launch.job_contract import ReservedPort
from holdfast.rl.config.named_code import load_code
from holdfast.rl.environments.client import EnvironmentClient, EnvironmentPool
from holdfast.rl.environments.environment import Action
from holdfast.rl.environments.registry import environment_factory
from holdfast.rl.errors import EnvironmentBusy, EnvironmentRefused
from support.event_loop import run
from support.leaks import children
from support.programs.forked_programs import run_program
from support.rl.environment_servers import ServerProcess, guess
from support.source_tree import ROOT, TESTS
from support.waiting import PROGRAM_SECONDS

pytestmark = pytest.mark.thorough  # each server takes seconds to import its library

NAME = f"{ROOT / 'examples' / 'rl' / 'mcp_tools.py'}:stock_tools"
example: Any = sys.modules[load_code(NAME).__module__]


def call(tool: str, **arguments: object) -> Action:
    return Action(json.dumps({"tool": tool, "arguments": arguments}))


@pytest.fixture(scope="module")
def environment() -> Iterator[Any]:
    found = environment_factory(f"python:{NAME}")()
    found.reset(0)  # starts its process
    yield found
    found.close()


def test_an_episode_with_tools_is_won_by_using_them(environment: Any) -> None:
    for seed in range(3):
        seen = environment.reset(seed)
        assert seen.fields["tools"] == ["add", "multiply", "stock"]
        question = seen.text.splitlines()[-1].removesuffix("?").replace(",", "").split()
        one, factor, other = question[5], int(question[7]), question[-1]
        have = [int(environment.step(call("stock", item=item)).text) for item in (one, other)]
        product = environment.step(Action("so: " + call("multiply", a=have[0], b=factor).text + " I think"))
        total = environment.step(call("add", a=int(product.text), b=have[1]))
        assert total.reward == 0.0
        last = environment.step(Action(json.dumps({"answer": int(total.text)})))
        assert (last.reward, last.done, last.fields) == (1.0, True, {"calls": 4})


@given(
    text=st.text(max_size=40)
    | st.sampled_from(
        ['{"tool": 1}', '{"tool": "add", "arguments": 3}', '{"a": {"answer": 1}}', '{"tool": "divide"}', "{" * 3000]
    )
)
def test_any_text_is_answered(environment: Any, text: str) -> None:
    assert environment.step(Action(text)).reward == 0.0


def test_a_wrong_call_is_an_answer_to_read(environment: Any) -> None:
    for wrong in (call("add", a=2), call("divide")):
        seen = environment.step(wrong)
        assert seen.text.startswith("error:") and seen.fields == {"failed": True}


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "closed"), (signal.SIGSTOP, "[Tt]imed out")])
def test_a_server_that_ends_or_hangs_costs_an_episode(number: signal.Signals, words: str) -> None:
    environment = example.ToolEnvironment(example.SERVER, example.stock_task)
    before = children()
    environment.reset(0)
    (server,) = children().keys() - before
    os.kill(server, number)
    environment._timeout = 1.0
    with pytest.raises(Exception, match=words):
        environment.step(call("add", a=1, b=1))
    environment.close()
    environment._timeout = 20.0
    environment.reset(0)
    assert environment.step(call("add", a=1, b=1)).text == "2"
    environment.close()
    assert children() == before


def test_a_server_of_its_own_for_each_episode() -> None:
    environment = example.ToolEnvironment(example.SERVER, example.stock_task, fresh=True)
    before, servers = children(), set()
    for seed in range(2):
        environment.reset(seed)
        servers |= children().keys() - before
    environment.close()
    assert len(servers) == 2 and children() == before


def test_a_program_that_is_no_server_is_refused() -> None:
    environment = example.ToolEnvironment([sys.executable, "-c", "pass"], example.stock_task)
    with pytest.raises(Exception, match="closed"):
        environment.reset(0)
    environment.close()


PEER = ROOT / ".venv" / "extras" / "openenv" / "bin" / "python"
PROGRAM = TESTS / "support" / "rl" / "openenv_peer.py"
SERVE = ROOT / "examples" / "stack" / "openenv" / "serve.py"

SEEDS = [0, 3, 7, 11]


def ask_peer(*arguments: str) -> Any:
    return json.loads(run_program(PEER, PROGRAM, *arguments))


async def played(url: str) -> list[Any]:
    """Episodes of our client, which waits until the server has started."""
    async with EnvironmentPool([url], wait=90.0) as pool, pool.session() as session:
        return [await guess(session, seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def openenv_server() -> Iterator[str]:
    if not PEER.exists():
        pytest.skip("openenv is not installed: make extra-openenv")
    with ReservedPort("127.0.0.1") as port:
        url = f"http://127.0.0.1:{port.number}"
        process = subprocess.Popen([PEER, SERVE, "guess", str(port.number)])
        try:
            run(played(url), PROGRAM_SECONDS)
            yield url
        finally:
            process.kill()
            process.wait(PROGRAM_SECONDS)


def test_both_clients_play_the_same_episodes_at_both_servers(openenv_server: str) -> None:
    with ServerProcess("guess") as server:
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


def test_ours_is_as_fast_as_openenv(openenv_server: str) -> None:
    """Interleaved, with OpenEnv's client on both sides: the servers differ."""
    with ServerProcess("guess") as server:
        first, ours, again, ours_again = ask_peer("steps", "1", "4", *[openenv_server, server.url] * 2)
        ratios = [ours / first, ours_again / again]
    print(f"steps/s of our server / openenv's, by openenv's client: {', '.join(f'{each:.2f}' for each in ratios)}")
    assert max(ratios) > 0.9
