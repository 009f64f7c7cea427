"""`ToolEnvironment`: questions that a policy answers with the tools of a local MCP server."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.environments.tools.mcp_client import McpClient, Tool
from holdfast.rl.environments.tools.stock_server import stock

USAGE = 'Call a tool by {"tool": NAME, "arguments": {...}}; end with {"answer": ...}.'
_ITEMS = ("bolts", "nuts", "washers", "screws", "nails", "hinges", "brackets", "springs")


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
        self,
        command: Sequence[str],
        tasks: Callable[[int], ToolTask],
        *,
        fresh: bool = False,
        timeout: float = 20.0,
    ) -> None:
        self._command, self._tasks, self._fresh, self._timeout = command, tasks, fresh, timeout
        self._client: McpClient | None = None
        self._task, self._calls = ToolTask("", ""), 0

    def reset(self, seed: int) -> Observation:
        if self._fresh:
            self.close()
        if self._client is None:
            self._client = McpClient(self._command, timeout=self._timeout)
        self._task, self._calls = self._tasks(seed), 0
        tools = self._client.tools
        text = "\n".join(["Tools:", *map(_describe, tools), USAGE, self._task.question])
        return Observation(text=text, fields={"tools": [tool.name for tool in tools]})

    def step(self, action: Action) -> Observation:
        assert self._client is not None, "a session resets before it steps"
        wanted = action.fields if action.fields else _object(action.text)
        if "answer" in wanted:
            right = str(wanted["answer"]).strip() == self._task.answer
            text = "right" if right else f"wrong: it is {self._task.answer}"
            return Observation(text=text, fields={"calls": self._calls}, reward=float(right), done=True)
        tool, arguments = wanted.get("tool"), wanted.get("arguments", {})
        if not isinstance(tool, str) or not isinstance(arguments, Mapping):
            return Observation(text=USAGE, reward=0.0)
        self._calls += 1
        result = self._client.call(tool, arguments)
        text = f"error: {result.text}" if result.failed else result.text
        return Observation(text=text, fields={"failed": result.failed}, reward=0.0)

    def state(self) -> Mapping[str, Any]:
        return {"question": self._task.question, "calls": self._calls}

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def stock_tools() -> ToolEnvironment:
    """`mcp`: sums about a stock that only a tool knows, with the server that is shipped."""
    return ToolEnvironment([sys.executable, "-m", "holdfast.rl.environments.tools.stock_server"], stock_task)


def stock_task(seed: int) -> ToolTask:
    """The stock of one item times a number, plus that of another."""
    numbers = random.Random(seed)
    one, other = numbers.sample(_ITEMS, 2)
    factor = numbers.randint(2, 99)
    question = f"What is the stock of {one} times {factor}, plus the stock of {other}?"
    return ToolTask(question, str(stock(one) * factor + stock(other)))


def _describe(tool: Tool) -> str:
    arguments = tool.schema.get("properties")
    named = ", ".join(map(str, arguments)) if isinstance(arguments, Mapping) else ""
    return f"{tool.name}({named}): {tool.description}"


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
