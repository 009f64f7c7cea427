"""Tool use over MCP: with the shipped server and with servers that fail, and against the protocol's own library."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rl.environments.environment import Action
from holdfast.rl.environments.mcp import McpClient, ToolEnvironment, ToolResult, ToolTask, stock_task, stock_tools
from holdfast.rl.environments.stock_server import answer, stock
from holdfast.rl.errors import EnvironmentDied, EnvironmentFailed, EnvironmentHung, EnvironmentLied

STOCK = [sys.executable, "-m", "holdfast.rl.environments.stock_server"]


def test_tools_are_listed_and_called_and_a_wrong_call_is_a_result_to_read() -> None:
    client = McpClient(STOCK)
    assert [tool.name for tool in client.tools] == ["add", "multiply", "stock"]
    assert client.call("add", {"a": 2, "b": 3}) == ToolResult("5", failed=False)
    assert client.call("stock", {"item": "nuts"}) == ToolResult(str(stock("nuts")), failed=False)
    assert client.call("add", {"a": 2}) == ToolResult("b must be a integer", failed=True)
    assert client.call("divide", {}) == ToolResult(
        "there is no tool divide; there are add, multiply, stock", failed=True
    )
    assert client.call("add", {"a": 1, "b": 1}).text == "2", "and the server goes on"
    client.close()


@pytest.fixture(scope="module")
def environment() -> Iterator[ToolEnvironment]:
    found = stock_tools()
    found.reset(0)  # starts its process
    yield found
    found.close()


def test_an_episode_with_tools_is_won_by_using_them(environment: ToolEnvironment) -> None:
    for seed in range(3):
        seen = environment.reset(seed)
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
    | st.sampled_from(['{"tool": 1}', '{"tool": "add", "arguments": 3}', '{"a": {"answer": 1}}', "{" * 3000])
)
def test_any_text_is_answered(environment: ToolEnvironment, text: str) -> None:
    assert environment.step(Action(text)).reward == 0.0


def test_a_server_that_is_killed_costs_an_episode() -> None:
    environment = stock_tools()
    environment.reset(0)
    assert environment._client is not None
    os.kill(environment._client.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentDied):
        environment.step(call("add", a=1, b=1))
    environment.close()
    environment.reset(0)
    assert environment.step(call("add", a=1, b=1)).text == "2"
    environment.close()


def test_a_server_that_is_stopped_costs_a_deadline() -> None:
    environment = ToolEnvironment(STOCK, stock_task, timeout=20.0)
    environment.reset(0)
    assert environment._client is not None
    os.kill(environment._client.pid, signal.SIGSTOP)
    environment._client._timeout = 0.3
    with pytest.raises(EnvironmentHung, match=r"no answer for 0\.3 s"):
        environment.step(call("add", a=1, b=1))
    environment.close()


BAD = {
    "mute": ("import time; time.sleep(60)", EnvironmentHung),
    "gone": ("pass", EnvironmentDied),
    "babbling": ("print('hello', flush=True); import time; time.sleep(60)", EnvironmentLied),
    "flooding": ("import sys\nwhile True: sys.stdout.write('x' * 65536)", EnvironmentLied),
    "odd": ('print(\'{"id": 1, "result": []}\', flush=True); import time; time.sleep(60)', EnvironmentLied),
    "refusing": (
        'print(\'{"id": 1, "error": {"code": 1, "message": "no"}}\', flush=True); import time; time.sleep(60)',
        EnvironmentFailed,
    ),
}


@pytest.mark.parametrize("how", BAD)
def test_a_program_that_is_no_server_is_refused_and_killed(how: str) -> None:
    program, error = BAD[how]
    with pytest.raises(error):
        McpClient([sys.executable, "-c", program], timeout=1.0 if how == "mute" else 20.0)


def test_a_server_that_is_killed_leaves_no_shared_memory(tmp_path: Path) -> None:
    program = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
open(sys.argv[1], "w").write(SharedMemory(create=True, size=1).name)
print("hello", flush=True)
time.sleep(60)
"""
    with pytest.raises(EnvironmentLied):
        McpClient([sys.executable, "-c", program, str(tmp_path / "name")])
    assert not Path("/dev/shm", (tmp_path / "name").read_text()).exists()


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(EnvironmentDied, match="No such file"):
        McpClient(["/no/such/program"])


def test_a_server_of_its_own_for_each_episode() -> None:
    environment = ToolEnvironment(STOCK, lambda seed: ToolTask("?", "1"), fresh=True)
    pids = set()
    for seed in range(2):
        environment.reset(seed)
        assert environment._client is not None
        pids.add(environment._client.pid)
    environment.close()
    assert len(pids) == 2


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_the_shipped_server_raises_lookup_errors_alone(parameters: object) -> None:
    for method in ("initialize", "tools/call", "tools/list", "other"):
        try:
            answer(method, parameters if isinstance(parameters, dict) else {})
        except LookupError:
            pass
        except AttributeError:
            assert isinstance(parameters, dict), "arguments that are no object: main() answers by an error"


LIBRARY_SERVER = """
from mcp.server import MCPServer
server = MCPServer("peer")

@server.tool()
def reverse(text: str) -> str:
    "The text backwards."
    if text == "fail":
        raise ValueError("it fails")
    return text[::-1]

server.run("stdio")
"""


def test_a_server_of_the_protocols_own_library_is_understood(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="pip install 'holdfast[mcp]'")
    program = tmp_path / "server.py"
    program.write_text(LIBRARY_SERVER)
    client = McpClient([sys.executable, str(program)], timeout=60.0)
    try:
        assert [(tool.name, tool.description) for tool in client.tools] == [("reverse", "The text backwards.")]
        assert client.call("reverse", {"text": "stream"}) == ToolResult("maerts", failed=False)
        assert client.call("reverse", {"text": "fail"}).failed
        assert client.call("reverse", {}).failed
    finally:
        client.close()


def test_the_protocols_own_client_understands_the_shipped_server() -> None:
    pytest.importorskip("mcp", reason="pip install 'holdfast[mcp]'")
    import asyncio

    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def body() -> None:
        parameters = StdioServerParameters(command=STOCK[0], args=STOCK[1:])
        async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            assert [tool.name for tool in (await session.list_tools()).tools] == ["add", "multiply", "stock"]
            result = await session.call_tool("add", {"a": 1, "b": 2})
            assert result.content[0].text == "3"  # type: ignore[union-attr]

    asyncio.run(asyncio.wait_for(body(), 60.0))


def call(tool: str, **arguments: object) -> Action:
    return Action(json.dumps({"tool": tool, "arguments": arguments}))
