"""Tools over the Model Context Protocol: a client of a local server, and the environment that uses it."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from holdfast.ft.processes.process_group import end_group, kill_group
from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.environments.stock_server import stock
from holdfast.rl.errors import (
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentHung,
    EnvironmentLied,
    EnvironmentRefused,
)

_T = TypeVar("_T")

PROTOCOL = "2025-06-18"
_MOST_BYTES = 8 << 20
_MOST_PAGES = 100
_METHOD_NOT_FOUND = -32601


class Tool(msgspec.Struct, frozen=True):
    """A tool as its server describes it; `schema` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    schema: Mapping[str, Any] = msgspec.field(default_factory=dict, name="inputSchema")


class ToolResult(msgspec.Struct, frozen=True):
    """What a call gave: a text, and whether it is an error that the tool reports."""

    text: str
    failed: bool


class _Error(msgspec.Struct, frozen=True):
    code: int
    message: str = ""


class _JsonRpcMessage(msgspec.Struct, frozen=True):
    """A response, a request of the server, or a notification."""

    id: int | str | None = None
    method: str | None = None
    result: dict[str, Any] | None = None
    error: _Error | None = None


class _Content(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class _CallResult(msgspec.Struct, frozen=True):
    content: list[_Content] = []
    failed: bool = msgspec.field(default=False, name="isError")


class _Page(msgspec.Struct, frozen=True):
    tools: list[Tool]
    next: str | None = msgspec.field(default=None, name="nextCursor")


_messages = msgspec.json.Decoder(_JsonRpcMessage)


class McpClient:
    """A server process of its own, started here and killed by `close`. Each call may take `timeout` seconds.

    Raises EnvironmentFailed if the server dies, hangs, or does not speak the protocol. Close the client then.
    """

    def __init__(
        self, command: Sequence[str], *, timeout: float = 30.0, environ: Mapping[str, str] | None = None
    ) -> None:
        self._name, self._timeout, self._number, self._unread = command[0], timeout, 0, bytearray()
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            raise EnvironmentDied(self._name, "start", str(error)) from error
        finally:
            theirs.close()
        try:
            about = {"name": "holdfast", "version": "0"}
            self._request("initialize", {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": about})
            self._send({"method": "notifications/initialized"}, time.monotonic() + timeout)
            self.tools = tuple(self._list_tools())
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. Errors that the tool or the server report are results: the policy should read them."""
        answer = self._request("tools/call", {"name": tool, "arguments": dict(arguments)}, errors=True)
        if isinstance(answer, _Error):
            return ToolResult(answer.message, failed=True)
        result = self._convert("tools/call", answer, _CallResult)
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        return ToolResult("\n".join(parts), result.failed)

    def close(self) -> None:
        """Kill the server with all processes of its session, and wait for it."""
        self._socket.close()
        if self._process.returncode is None:  # else its number may be another group's
            kill_group(self._process.pid)
            self._process.wait()
            end_group(self._process.pid)

    def _list_tools(self) -> list[Tool]:
        tools, cursor = list[Tool](), None
        for _ in range(_MOST_PAGES):
            answer = self._request("tools/list", {} if cursor is None else {"cursor": cursor})
            page = self._convert("tools/list", answer, _Page)
            tools, cursor = tools + page.tools, page.next
            if cursor is None:
                return tools
        raise EnvironmentLied(self._name, "tools/list", f"it has more than {_MOST_PAGES} pages of tools")

    def _request(self, method: str, parameters: Mapping[str, Any], *, errors: bool = False) -> Any:
        deadline = time.monotonic() + self._timeout
        self._number += 1
        self._send({"id": self._number, "method": method, "params": parameters}, deadline)
        while True:
            message = self._receive(method, deadline)
            if message.method is not None:
                self._answer(message, deadline)
            elif message.id == self._number:
                if message.error is None:
                    return message.result or {}
                if errors:
                    return message.error
                why = f"{message.error.message} ({message.error.code})"
                raise EnvironmentRefused(self._name, method, why)

    def _answer(self, message: _JsonRpcMessage, deadline: float) -> None:
        """A request of the server: it may ask whether we live, and nothing else."""
        if message.id is None:
            return
        refusal = {"error": {"code": _METHOD_NOT_FOUND, "message": "the client has no such method"}}
        self._send({"id": message.id, **({"result": {}} if message.method == "ping" else refusal)}, deadline)

    def _send(self, message: Mapping[str, Any], deadline: float) -> None:
        data = msgspec.json.encode({"jsonrpc": "2.0", **message}) + b"\n"
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            self._socket.sendall(data)
        except OSError as error:
            raise self._failure(str(message.get("method")), error) from error

    def _receive(self, call: str, deadline: float) -> _JsonRpcMessage:
        while (end := self._unread.find(b"\n")) < 0:
            if len(self._unread) > _MOST_BYTES:
                raise EnvironmentLied(self._name, call, f"a message has more than {_MOST_BYTES:,} bytes")
            try:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                data = self._socket.recv(1 << 16)
            except OSError as error:
                raise self._failure(call, error) from error
            if not data:
                raise EnvironmentDied(self._name, call, "it has closed its output")
            self._unread += data
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        try:
            return _messages.decode(line)
        except msgspec.MsgspecError as error:
            raise EnvironmentLied(self._name, call, f"a line of its output is no message: {error}") from error

    def _failure(self, call: str, error: OSError) -> EnvironmentFailed:
        if isinstance(error, TimeoutError):
            return EnvironmentHung(self._name, call, f"no answer for {self._timeout:.3g} s")
        return EnvironmentDied(self._name, call, f"it does not listen any more: {error}")

    def _convert(self, call: str, answer: Any, kind: type[_T]) -> _T:
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise EnvironmentLied(self._name, call, str(error)) from error


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
    return ToolEnvironment([sys.executable, "-m", "holdfast.rl.environments.stock_server"], stock_task)


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
