"""Tools of a local server of the Model Context Protocol, by its own library: `pip install 'holdfast[rl,mcp]'`.

    holdfast rl environment serve python:examples/rl/mcp_tools.py:stock_tools

`ToolEnvironment` asks questions that need the tools of any server. Run as a program, this file is such a server.
"""

import json
import random
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from anyio.from_thread import start_blocking_portal
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from holdfast.rl.environments.environment import Action, Environment, Observation

USAGE = 'Call a tool by {"tool": NAME, "arguments": {...}}; end with {"answer": ...}.'
START_SECONDS = 60.0
"""Seconds in which a server must have started."""


class ToolTask(msgspec.Struct, frozen=True):
    """A question and its answer."""

    question: str
    answer: str


class ToolEnvironment(Environment):
    """Asks the question of a seed. Each action is a JSON object in the text, or the fields: a tool call or the answer.

    The reward is 1 for the right answer, which ends the episode. The server is started by `command` at the first
    reset, and serves all episodes; with `fresh` each has a server of its own, as it must for tools that remember. A
    server that dies or hangs (`timeout` seconds for a call) costs the episode.
    """

    def __init__(
        self, command: Sequence[str], tasks: Callable[[int], ToolTask], *, fresh: bool = False, timeout: float = 20.0
    ) -> None:
        self._command, self._tasks, self._fresh, self._timeout = command, tasks, fresh, timeout
        self._open = ExitStack()
        self._ask: Callable[..., Any] | None = None
        self._tools: list[Any] = []
        self._task, self._calls = ToolTask("", ""), 0

    def reset(self, seed: int) -> Observation:
        if self._fresh:
            self.close()
        if self._ask is None:
            portal = self._open.enter_context(start_blocking_portal())
            session = self._open.enter_context(portal.wrap_async_context_manager(_connected(self._command)))
            self._ask = partial(portal.call, session.call_tool)
            self._tools = portal.call(session.list_tools).tools
        self._task, self._calls = self._tasks(seed), 0
        text = "\n".join(["Tools:", *map(_describe, self._tools), USAGE, self._task.question])
        return Observation(text=text, fields={"tools": [tool.name for tool in self._tools]})

    def step(self, action: Action) -> Observation:
        assert self._ask is not None, "a session resets before it steps"
        wanted = action.fields if action.fields else _object(action.text)
        if "answer" in wanted:
            right = str(wanted["answer"]).strip() == self._task.answer
            text = "right" if right else f"wrong: it is {self._task.answer}"
            return Observation(text=text, fields={"calls": self._calls}, reward=float(right), done=True)
        tool, arguments = wanted.get("tool"), wanted.get("arguments", {})
        if not isinstance(tool, str) or not isinstance(arguments, Mapping):
            return Observation(text=USAGE, reward=0.0)
        self._calls += 1
        result = self._ask(tool, dict(arguments), self._timeout)
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        text = "\n".join([*["error:"] * result.is_error, *parts])
        return Observation(text=text, fields={"failed": result.is_error}, reward=0.0)

    def state(self) -> Mapping[str, Any]:
        return {"question": self._task.question, "calls": self._calls}

    def close(self) -> None:
        self._ask = None
        self._open.close()


@asynccontextmanager
async def _connected(command: Sequence[str]) -> AsyncIterator[ClientSession]:
    """A session with a server process of its own, which ends with it."""
    server = StdioServerParameters(command=command[0], args=list(command[1:]))
    try:
        async with (
            stdio_client(server) as streams,
            ClientSession(*streams, read_timeout_seconds=START_SECONDS) as session,
        ):
            await session.initialize()
            yield session
    except ExceptionGroup as group:  # of the tasks of both
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def _describe(tool: Any) -> str:
    return f"{tool.name}({', '.join(tool.input_schema.get('properties', ()))}): {tool.description}"


def _object(text: str) -> Mapping[str, Any]:
    """The first JSON object in a text, or an empty one."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            found = decoder.raw_decode(text, start)[0]
            return found if isinstance(found, dict) else {}
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
    return {}


# -- a server with three tools, and questions about a stock that only one of them knows

SERVER = (sys.executable, str(Path(__file__).resolve()))
ITEMS = ("bolts", "nuts", "washers", "screws", "nails", "hinges", "brackets", "springs")


def stock(item: str) -> int:
    """How many of an item are in stock."""
    return zlib.crc32(item.encode()) % 900 + 100


def add(a: int, b: int) -> int:
    """The sum of two integers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """The product of two integers."""
    return a * b


def stock_task(seed: int) -> ToolTask:
    """The stock of one item times a number, plus that of another."""
    numbers = random.Random(seed)
    one, other = numbers.sample(ITEMS, 2)
    factor = numbers.randint(2, 99)
    question = f"What is the stock of {one} times {factor}, plus the stock of {other}?"
    return ToolTask(question, str(stock(one) * factor + stock(other)))


def stock_tools() -> ToolEnvironment:
    """The environment of these questions and this server."""
    return ToolEnvironment(SERVER, stock_task)


if __name__ == "__main__":
    from mcp.server import MCPServer

    server = MCPServer("stock", log_level="ERROR")
    for each in (add, multiply, stock):
        server.tool()(each)
    server.run("stdio")
