"""A server tells what its sessions' calls took, beside the sessions, to any number of readers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")

from holdfast.rl.environments.builtin.guess_number import GuessNumberEnvironment
from holdfast.rl.environments.client import EnvironmentClient
from holdfast.rl.environments.environment import Action, Observation
from holdfast.rl.environments.server import EnvironmentServer
from holdfast.rl.run.environment_servers import NoWorkToTell, ask_work
from holdfast.rl.telemetry import FOLD_SECONDS, WorkLog
from support.rl.environment_servers import server_process
from support.waiting import PATIENCE


class Slow(GuessNumberEnvironment):
    """Its steps need a processor for 0.1 s."""

    def step(self, action: Action) -> Observation:
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        return super().step(action)


async def test_a_server_of_another_process_tells_its_calls_and_its_processor_time() -> None:
    with server_process("guess") as server:
        url = server.url
        first = await ask_work(url, None)
        assert first is not None and first.spans == ()
        async with EnvironmentClient(url) as client:
            await client.reset(0)
            await client.step("50")
            await client.state()
        found = await ask_work(url, first.next)
        assert found is not None and (found.server, found.pid) == (first.server, server.pid)
        assert [(each.what, each.number) for each in found.spans] == [("reset", 1), ("step", 1), ("state", 1)]
        assert all(each.ago >= each.seconds >= 0 for each in found.spans)
        assert found.cpu >= first.cpu > 0
        again = await ask_work(url, first.next)
        assert again is not None and len(again.spans) == 3, "another reader gets them too"
        later = await ask_work(url, found.next)
        assert later is not None and later.spans == ()
        server.kill()
        assert await ask_work(url, found.next) is None
        server.start()
        restarted = await ask_work(url, found.next)
        assert restarted is not None and restarted.server != first.server


async def test_a_step_has_the_processor_time_of_its_own_thread() -> None:
    async with EnvironmentServer(Slow, "slow") as server, EnvironmentClient(server.url) as client:
        await client.reset(0)
        begun = await ask_work(server.url, None)
        assert begun is not None
        await client.step("50")
        found = await ask_work(server.url, begun.next)
        assert found is not None
        [step] = found.spans
        assert step.what == "step" and 0.1 <= step.cpu <= step.seconds


def test_thousands_of_short_calls_are_a_few_spans_which_last_as_long_together() -> None:
    work = WorkLog()
    began = time.monotonic()
    for _ in range(2000):
        with work.calling("step"):
            pass
    took = time.monotonic() - began
    spans = work.read(0).spans
    assert len(spans) <= 1 + took / FOLD_SECONDS
    assert sum(each.number for each in spans) == 2000
    assert 0 < sum(each.seconds for each in spans) < took, "the pauses between calls are none of its work"


def test_calls_of_several_sessions_count_once_and_one_that_runs_is_told_up_to_now() -> None:
    work = WorkLog()
    barrier, end = threading.Barrier(3), threading.Event()

    def call() -> None:
        with work.calling("step"):
            barrier.wait(30.0)
            end.wait(30.0)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for each in threads:
        each.start()
    barrier.wait(30.0)
    time.sleep(0.1)
    first = work.read(0)
    [span] = first.spans
    assert span.number == 2 and span.seconds == pytest.approx(span.ago) and span.seconds >= 0.1
    end.set()
    for each in threads:
        each.join()
    [rest] = work.read(first.next).spans
    assert rest.number == 2 and rest.seconds + rest.ago < first.spans[0].seconds + 60.0


@pytest.mark.parametrize("since", ["-1", "x", "1e99", str(1 << 70), ""])
async def test_a_malformed_request_is_refused_and_the_server_goes_on(since: str) -> None:
    async with EnvironmentServer(GuessNumberEnvironment, "guess") as server:
        url = f"{server.url.replace('ws://', 'http://')}/work?since={since}"
        if since:
            with pytest.raises(urllib.error.HTTPError, match="400"):
                await asyncio.to_thread(urllib.request.urlopen, url, timeout=PATIENCE)
        assert await ask_work(server.url, None) is not None


@contextlib.asynccontextmanager
async def listening(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """The URL of a server of another program, which answers each request as it likes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


SPAN = {"what": "step", "number": 1, "ago": 1.0, "seconds": 0.5, "cpu": 0.1}
ANSWER = {"server": "s", "host": "h", "pid": 1, "next": 1, "cpu": 1.0, "spans": [SPAN]}
LIES: list[dict[str, Any]] = [
    ANSWER | {"spans": [SPAN | {"what": "<script>"}]},
    ANSWER | {"spans": [SPAN | {"seconds": -1.0}]},
    ANSWER | {"spans": [SPAN | {"ago": 1e300}]},
    ANSWER | {"spans": [SPAN] * 5000},
    ANSWER | {"server": "s" * 300},
    {key: value for key, value in ANSWER.items() if key != "next"},
]


async def test_a_server_that_lies_or_tells_nothing_is_none_to_ask() -> None:
    answers = itertools.chain([ANSWER], LIES, [None])

    async def answer(writer: asyncio.StreamWriter) -> None:
        found = next(answers)
        status = "404 Not Found" if found is None else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{json.dumps(found)}".encode())

    async with listening(answer) as url:
        assert await ask_work(url, 0, PATIENCE) is not None
        for _ in (*LIES, None):
            with pytest.raises(NoWorkToTell):
                await ask_work(url, 0, PATIENCE)


async def test_a_server_that_does_not_answer_costs_the_limit_and_no_more() -> None:
    over = asyncio.Event()

    async def silent(writer: asyncio.StreamWriter) -> None:
        await over.wait()

    async with listening(silent) as url:
        began = time.monotonic()
        assert await ask_work(url, 0, timeout=0.2) is None
        assert time.monotonic() - began < PATIENCE
        over.set()
