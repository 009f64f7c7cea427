"""Sessions: local and remote ones obey and fail alike; a session that failed is never used again."""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")

from holdfast.rl.environments.builtin import GuessNumberEnvironment
from holdfast.rl.environments.client import EnvironmentClient, websocket_url
from holdfast.rl.environments.environment import Action, Environment, Observation, checked
from holdfast.rl.environments.local import LocalSession
from holdfast.rl.environments.server import EnvironmentServer
from holdfast.rl.environments.session import EnvironmentSession
from holdfast.rl.errors import (
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentHung,
    EnvironmentLied,
    EnvironmentRefused,
    EpisodeOver,
    UnknownEnvironment,
)
from holdfast.rl.telemetry import FOLD_SECONDS, WorkLog
from support.rl.environment_servers import LIES, Misbehaving, guess
from support.rl.event_loop import until
from support.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _end_what_hangs() -> Iterator[None]:
    Misbehaving.release.clear()
    yield
    Misbehaving.release.set()


def local(factory: Callable[[], Environment], timeout: float = 30.0) -> LocalSession:
    return LocalSession(factory, "test", timeout=timeout)


@asynccontextmanager
async def remote(factory: Callable[[], Environment], timeout: float = 30.0) -> AsyncIterator[EnvironmentSession]:
    async with (
        EnvironmentServer(factory, "test", timeout=timeout) as server,
        EnvironmentClient(server.url, timeout=timeout + 5.0) as client,
    ):
        yield client


Open = Callable[..., "AsyncIterator[EnvironmentSession]"]
both = pytest.mark.parametrize("opened", [local, remote])


async def test_an_episode_depends_on_its_seed_alone_local_and_remote() -> None:
    played = []
    for opened in (local, remote):
        async with opened(GuessNumberEnvironment) as session:
            played.append([await guess(session, seed) for seed in (3, 7, 3)])
    first, other, again = played[0]
    assert played[0] == played[1] and first == again != other
    assert first[1] == 1.0


@both
async def test_the_state_counts_steps(opened: Open) -> None:
    async with opened(GuessNumberEnvironment) as session:
        assert (await session.state()).step_count == 0
        await session.reset(1)
        await session.step(Action(fields={"number": 101}))
        state = await session.state()
        assert state.step_count == 1
        assert state.fields == {"high": 100, "turns_left": 6}


@both
async def test_a_step_without_a_running_episode_is_refused_and_costs_nothing(opened: Open) -> None:
    async with opened(Misbehaving) as session:
        with pytest.raises(EpisodeOver, match="no episode has begun"):
            await session.step("go")
        await session.reset(0)
        assert (await session.step("end")).done
        with pytest.raises(EpisodeOver, match=r"the last one is over; call reset\(\) first"):
            await session.step("go")
        await session.reset(0)
        assert (await session.step("go")).text == "1"


FAULTS = [
    *((how, EnvironmentLied) for how in LIES),
    ("raise", EnvironmentDied),
    ("exit", EnvironmentDied),
    ("hang", EnvironmentHung),
]


@pytest.mark.parametrize(
    ("opened", "how", "error"),
    [
        *((opened, *fault) for opened in (local, remote) for fault in FAULTS),
        *((remote, how, EnvironmentLied) for how in ("object", "huge")),  # they cannot travel
    ],
)
async def test_a_step_that_misbehaves_is_named_and_the_session_refuses_everything_from_then_on(
    opened: Open, how: str, error: type[EnvironmentFailed]
) -> None:
    async with opened(Misbehaving, 0.2 if how == "hang" else 30.0) as session:
        await session.reset(0)
        assert (await session.step("go")).reward == 0.5
        with pytest.raises(error, match=r"^step of environment "):
            await session.step(how)
        for call in (session.reset(1), session.step("go"), session.state()):
            with pytest.raises(EnvironmentRefused, match=r"the session has failed .* open another"):
                await call


@both
async def test_an_environment_that_cannot_be_made_fails_its_first_call(opened: Open) -> None:
    def factory() -> Environment:
        raise OSError("no such game")

    async with opened(factory) as session:
        with pytest.raises(EnvironmentDied, match="no such game"):
            await session.reset(0)


@both
async def test_a_cancelled_call_ends_the_session(opened: Open) -> None:
    """The answer to that call would be taken for the answer to the next one."""
    async with opened(Misbehaving) as session:
        await session.reset(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await session.step("hang")
        Misbehaving.release.set()
        with pytest.raises(EnvironmentRefused, match="step was cancelled"):
            await session.step("go")


@both
async def test_two_calls_at_a_time_are_refused(opened: Open) -> None:
    async with opened(Misbehaving) as session:
        await session.reset(0)
        hanging = asyncio.ensure_future(session.step("hang"))
        await asyncio.sleep(0)
        with pytest.raises(EnvironmentRefused, match="one call at a time"):
            await session.state()
        Misbehaving.release.set()
        with pytest.raises(EnvironmentLied):  # a wait returns a bool
            await hanging


async def test_a_closed_session_is_refused() -> None:
    async with EnvironmentServer(Misbehaving, "test") as server:
        client = EnvironmentClient(server.url)
        await client.reset(0)
        await client.close()
        await client.close()
        with pytest.raises(EnvironmentRefused, match="closed"):
            await client.reset(0)


async def test_a_hundred_sessions_leave_nothing() -> None:
    async with EnvironmentServer(Misbehaving, "test", sessions=1) as server:
        for number in range(100):
            async with EnvironmentClient(server.url) as client:
                await client.reset(0)
                if number % 3 == 0:
                    with pytest.raises(EnvironmentFailed):
                        await client.step("raise")
            await until(lambda: server.health().sessions == 0)
        assert server.health().hung == 0


async def test_a_session_without_requests_loses_its_lease() -> None:
    """The socket stays open: it is the silence that counts."""
    async with (
        EnvironmentServer(Misbehaving, "test", sessions=1, lease=0.2) as server,
        EnvironmentClient(server.url) as idle,
    ):
        await idle.reset(0)
        await until(lambda: server.health().sessions == 0)
        async with EnvironmentClient(server.url) as another:
            await another.reset(0)
        with pytest.raises(EnvironmentDied, match=r"no request for 0\.2 s"):
            await idle.step("go")


async def test_a_hanging_environment_keeps_its_place_and_health_tells() -> None:
    async with EnvironmentServer(Misbehaving, "test", sessions=1, timeout=0.1) as server:
        async with EnvironmentClient(server.url) as client:
            await client.reset(0)
            with pytest.raises(EnvironmentHung):
                await client.step("hang")
        await until(lambda: server.health().hung == 1)
        told = await asyncio.to_thread(get, server.url.replace("ws", "http", 1) + "/health")
        assert told == {"status": "unhealthy", "environment": "test", "sessions": 1, "limit": 1, "hung": 1}
        Misbehaving.release.set()
        await until(lambda: server.health().sessions == 0)
        assert server.health().status == "healthy"


async def test_a_server_ends_at_once_though_an_environment_hangs() -> None:
    async with EnvironmentServer(Misbehaving, "test", timeout=60.0) as server:
        client = EnvironmentClient(server.url)
        await client.reset(0)
        hanging = asyncio.ensure_future(client.step("hang"))
        await until(lambda: any(session.at_work for session in server._sessions))
        begun = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - begun < PATIENCE
    with pytest.raises(EnvironmentDied):
        await hanging
    await client.close()


GARBAGE = ["", "x", "{}", "[]", '{"type":"fly"}', '{"type":"step"}', '{"type":"reset","data":{"seed":"one"}}', "NaN"]


async def test_a_server_answers_garbage_by_an_error_and_serves_on() -> None:
    from websockets.asyncio.client import connect

    async with EnvironmentServer(Misbehaving, "test") as server:
        for text in (*GARBAGE, b"\x00\xff", "[" * 100_000):
            async with connect(server.url + "/ws") as socket:
                await socket.send(text)
                answer = json.loads(await socket.recv())
                assert answer["type"] == "error", text
                assert answer["data"]["code"] in ("INVALID_JSON", "VALIDATION_ERROR"), text
            async with EnvironmentClient(server.url) as client:
                await client.reset(0)


async def test_a_page_in_a_browser_and_another_path_get_no_session() -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus
    from websockets.typing import Origin

    async with EnvironmentServer(Misbehaving, "test") as server:
        with pytest.raises(InvalidStatus, match="403"):
            await connect(server.url + "/ws", origin=Origin("http://127.0.0.1:8000"))
        client = EnvironmentClient(server.url)
        client._url = server.url + "/other"
        with pytest.raises(EnvironmentDied, match="404"):
            await client.connect()
        await client.close()


async def test_a_message_over_the_limit_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.rl.environments.messages.MOST_BYTES", 1000)
    async with EnvironmentServer(Misbehaving, "test") as server:
        async with EnvironmentClient(server.url) as client:
            await client.reset(0)
            with pytest.raises(EnvironmentDied, match="1009"):
                await client.step("x" * 2000)
        await until(lambda: server.health().sessions == 0)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ws://a:1", "ws://a:1/ws"),
        ("http://a:1/", "ws://a:1/ws"),
        ("https://a/b/ws", "wss://a/b/ws"),
        ("ws://[::1]:5/ws/", "ws://[::1]:5/ws"),
    ],
)
def test_urls(url: str, expected: str) -> None:
    assert websocket_url(url) == expected


@pytest.mark.parametrize("url", ["", "a:1", "ftp://a", "ws://"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UnknownEnvironment, match="ws://host:port"):
        websocket_url(url)


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)


@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING | st.dictionaries(st.text(), ANYTHING))
@example("", 10**400, False, {})
@example("", np.float32(0.5), False, {})
@example("", np.float64("nan"), False, {})
def test_an_observation_is_one_or_a_lie(text: Any, reward: Any, done: Any, fields: Any) -> None:
    observation = Observation(text=text, reward=reward, done=done, fields=fields)
    try:
        good = checked(observation, "test", "step")
    except EnvironmentLied as error:
        assert len(str(error)) < 200
        return
    assert type(good.text) is str and type(good.done) is bool
    assert good.reward is None or (type(good.reward) is float and math.isfinite(good.reward))


def get(url: str) -> object:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


async def test_handshakes_that_are_never_done_are_bounded_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped, and a client still gets its session."""
    monkeypatch.setattr("holdfast.rl.environments.server._MOST_HANDSHAKES", 8)
    async with EnvironmentServer(GuessNumberEnvironment, "guess") as server:
        place = urlsplit(server.url)
        idle = [await asyncio.open_connection(place.hostname, place.port) for _ in range(30)]
        dropped = [reader for reader, _ in idle[:22]]
        assert [await asyncio.wait_for(reader.read(), 10.0) for reader in dropped] == [b""] * 22
        async with EnvironmentClient(server.url, timeout=20.0) as client:
            await client.reset(1)
        open_still = sum(not reader.at_eof() for reader, _ in idle)
        for _, writer in idle:
            writer.close()
    assert open_still in (7, 8), "the client takes the place of one"


class Slow(GuessNumberEnvironment):
    """Its steps need a processor for 0.1 s."""

    def step(self, action: Action) -> Observation:
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        return super().step(action)


async def test_each_call_is_a_span_with_the_processor_time_of_its_own_thread() -> None:
    async with EnvironmentServer(Slow, "slow") as server, EnvironmentClient(server.url) as client:
        await client.reset(0)
        await client.step("50")
        await client.state()
        report = server.work.report()
        assert [(each.what, each.number) for each in report.spans] == [("reset", 1), ("step", 1), ("state", 1)]
        assert all(report.now - each.began >= each.seconds >= 0 for each in report.spans)
        assert 0.1 <= report.spans[1].cpu <= report.spans[1].seconds and report.cpu >= 0.1
        assert server.work.report().spans == ()


def test_thousands_of_short_calls_are_a_few_spans_which_last_as_long_together() -> None:
    work = WorkLog()
    began = time.monotonic()
    for _ in range(2000):
        with work.calling("step"):
            pass
    took = time.monotonic() - began
    spans = work.report().spans
    assert len(spans) <= 1 + took / FOLD_SECONDS
    assert sum(each.number for each in spans) == 2000
    assert 0 < sum(each.seconds for each in spans) < took


def test_calls_at_the_same_time_are_one_span_from_the_first_begin_to_the_last_end() -> None:
    work, began = WorkLog(), time.monotonic()
    with work.calling("step"):
        time.sleep(0.01)
        later = time.monotonic()
        with work.calling("step"):
            pass
    ended = time.monotonic()
    [span] = work.report().spans
    assert span.number == 2 and began <= span.began < later <= span.began + span.seconds <= ended
