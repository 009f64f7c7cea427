"""Sessions, local, remote and of pools, obey and fail alike: each fault costs an episode at most."""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")

from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from holdfast.rl import errors
from holdfast.rl.environments import messages
from holdfast.rl.environments.builtin import GuessNumberEnvironment
from holdfast.rl.environments.client import EnvironmentClient, EnvironmentPool, websocket_url
from holdfast.rl.environments.environment import Action, Environment, Observation, State, checked
from holdfast.rl.environments.local import LocalSession
from holdfast.rl.environments.messages import MalformedMessage
from holdfast.rl.environments.server import EnvironmentServer
from holdfast.rl.environments.session import EnvironmentSession
from holdfast.rl.telemetry import FOLD_SECONDS, WorkLog
from support.children import Child
from support.event_loop import until
from support.rl.environment_servers import LIES, Misbehaving, ServerProcess, guess
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
async def test_a_step_without_a_running_episode_is_refused_and_costs_nothing(opened: Open) -> None:
    async with opened(GuessNumberEnvironment) as session:
        assert (await session.state()).step_count == 0
        with pytest.raises(errors.EpisodeOver, match="no episode has begun"):
            await session.step("1")
        await session.reset(1)
        await session.step(Action(fields={"number": 101}))
        state = await session.state()
        assert state.step_count == 1
        assert state.fields == {"high": 100, "turns_left": 6}
        await guess(session, 0)
        with pytest.raises(errors.EpisodeOver, match=r"the last one is over; call reset\(\) first"):
            await session.step("1")
        assert not (await session.reset(0)).done


FAULTS = [
    *((how, errors.EnvironmentLied) for how in LIES),
    ("raise", errors.EnvironmentDied),
    ("exit", errors.EnvironmentDied),
    ("hang", errors.EnvironmentHung),
]


@pytest.mark.parametrize(
    ("opened", "how", "error"),
    [
        *((opened, *fault) for opened in (local, remote) for fault in FAULTS),
        *((remote, how, errors.EnvironmentLied) for how in ("object", "huge")),  # they cannot travel
    ],
)
async def test_a_step_that_misbehaves_is_named_and_the_session_refuses_everything_from_then_on(
    opened: Open, how: str, error: type[errors.EnvironmentFailed]
) -> None:
    async with opened(Misbehaving, 0.2 if how == "hang" else 30.0) as session:
        await session.reset(0)
        assert (await session.step("go")).reward == 0.5
        with pytest.raises(error, match=r"^step of environment "):
            await session.step(how)
        for call in (session.reset(1), session.step("go"), session.state()):
            with pytest.raises(errors.EnvironmentRefused, match=r"the session has failed .* open another"):
                await call


@both
async def test_an_environment_that_cannot_be_made_fails_its_first_call(opened: Open) -> None:
    def factory() -> Environment:
        raise OSError("no such game")

    async with opened(factory) as session:
        with pytest.raises(errors.EnvironmentDied, match="no such game"):
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
        with pytest.raises(errors.EnvironmentRefused, match="step was cancelled"):
            await session.step("go")


@both
async def test_two_calls_at_a_time_are_refused_and_calls_of_a_closed_session(opened: Open) -> None:
    async with opened(Misbehaving) as session:
        await session.reset(0)
        hanging = asyncio.ensure_future(session.step("hang"))
        await asyncio.sleep(0)
        with pytest.raises(errors.EnvironmentRefused, match="one call at a time"):
            await session.state()
        Misbehaving.release.set()
        with pytest.raises(errors.EnvironmentLied):  # a wait returns a bool
            await hanging
        await session.close()
        await session.close()
        with pytest.raises(errors.EnvironmentRefused, match="closed"):
            await session.reset(0)


async def test_a_hundred_sessions_leave_nothing() -> None:
    async with EnvironmentServer(Misbehaving, "test", sessions=1) as server:
        for number in range(100):
            async with EnvironmentClient(server.url) as client:
                await client.reset(0)
                if number % 3 == 0:
                    with pytest.raises(errors.EnvironmentFailed):
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
        with pytest.raises(errors.EnvironmentDied, match=r"no request for 0\.2 s"):
            await idle.step("go")


async def test_a_hanging_environment_keeps_its_place_and_health_tells() -> None:
    async with EnvironmentServer(Misbehaving, "test", sessions=1, timeout=0.1) as server:
        async with EnvironmentClient(server.url) as client:
            await client.reset(0)
            with pytest.raises(errors.EnvironmentHung):
                await client.step("hang")
        await until(lambda: server.health().hung == 1)
        health = server.url.replace("ws", "http", 1) + "/health"
        with await asyncio.to_thread(urllib.request.urlopen, health, timeout=20) as answer:
            told = json.load(answer)
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
    with pytest.raises(errors.EnvironmentDied):
        await hanging
    await client.close()


GARBAGE = ["", "x", "{}", "[]", '{"type":"fly"}', '{"type":"step"}', '{"type":"reset","data":{"seed":"one"}}', "NaN"]


async def test_a_server_answers_garbage_by_an_error_and_serves_on() -> None:
    async with EnvironmentServer(Misbehaving, "test") as server:
        for text in (*GARBAGE, b"\x00\xff", "[" * 100_000):
            async with connect(server.url + "/ws") as socket:
                await socket.send(text)
                answer = json.loads(await socket.recv())
                assert answer["type"] == "error", text
                assert answer["data"]["code"] in ("INVALID_JSON", "VALIDATION_ERROR"), text
            async with EnvironmentClient(server.url) as client:
                await client.reset(0)


async def test_a_client_that_asks_to_close_ends_its_session_and_is_hung_up_on() -> None:
    async with EnvironmentServer(Misbehaving, "test") as server, connect(server.url + "/ws") as socket:
        await socket.send('{"type":"reset","data":{}}')
        assert json.loads(await socket.recv())["type"] == "observation"
        assert server.health().sessions == 1
        await socket.send('{"type":"close"}')
        await asyncio.wait_for(socket.wait_closed(), PATIENCE)
        await until(lambda: server.health().sessions == 0)


async def test_a_page_in_a_browser_and_another_path_get_no_session() -> None:
    async with EnvironmentServer(Misbehaving, "test") as server:
        with pytest.raises(InvalidStatus, match="403"):
            await connect(server.url + "/ws", origin=Origin("http://127.0.0.1:8000"))
        client = EnvironmentClient(server.url)
        client._url = server.url + "/other"
        with pytest.raises(errors.EnvironmentDied, match="404"):
            await client.connect()
        await client.close()


async def test_a_message_over_the_limit_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.rl.environments.messages.MOST_BYTES", 1000)
    async with EnvironmentServer(Misbehaving, "test") as server:
        async with EnvironmentClient(server.url) as client:
            await client.reset(0)
            with pytest.raises(errors.EnvironmentDied, match="1009"):
                await client.step("x" * 2000)
        await until(lambda: server.health().sessions == 0)


URLS = {
    "ws://a:1": "ws://a:1/ws",
    "http://a:1/": "ws://a:1/ws",
    "https://a/b/ws": "wss://a/b/ws",
    "ws://[::1]:5/ws/": "ws://[::1]:5/ws",
}


def test_the_url_of_a_server_is_completed_and_what_is_none_is_refused() -> None:
    assert {url: websocket_url(url) for url in URLS} == URLS
    for url in ("", "a:1", "ftp://a", "ws://"):
        with pytest.raises(errors.UnknownEnvironment, match="ws://host:port"):
            EnvironmentPool([url])
    with pytest.raises(errors.UnknownEnvironment, match="at least one server"):
        EnvironmentPool([])


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)


@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING | st.dictionaries(st.text(), ANYTHING))
@example("", 10**400, False, {})
@example("", np.float32(0.5), False, {})
@example("", np.float64("nan"), False, {})
def test_an_observation_is_one_or_a_lie(text: Any, reward: Any, done: Any, fields: Any) -> None:
    observation = Observation(text=text, reward=reward, done=done, fields=fields)
    try:
        good = checked(observation, "test", "step")
    except errors.EnvironmentLied as error:
        assert len(str(error)) < 200
        return
    assert type(good.text) is str and type(good.done) is bool
    assert good.reward is None or (type(good.reward) is float and math.isfinite(good.reward))


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


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(TEXT.filter(lambda name: name not in RESERVED), JSON, max_size=4)
RESERVED = {"text", "metadata", "prompt", "episode_id", "step_count"}
REWARDS = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.builds(Action, TEXT, FIELDS),
    st.builds(Observation, text=TEXT, fields=FIELDS, reward=REWARDS, done=st.booleans()),
    st.builds(State, episode_id=st.none() | TEXT, step_count=st.integers(0, 2**31), fields=FIELDS),
)
def test_what_is_sent_arrives_as_it_was_sent(action: Action, observation: Observation, state: State) -> None:
    request = messages.decode_request(messages.encode(messages.StepRequest(messages.action_to_wire(action))))
    assert isinstance(request, messages.StepRequest)
    assert messages.action_from_wire(request.data) == action
    reply = messages.decode_reply(messages.encode(messages.observation_to_wire(observation)))
    assert isinstance(reply, messages.ObservationReply)
    assert messages.observation_from_wire(reply.data) == observation
    reply = messages.decode_reply(messages.encode(messages.state_to_wire(state)))
    assert isinstance(reply, messages.StateReply)
    assert messages.state_from_wire(reply.data) == state


KINDS = st.sampled_from(["reset", "step", "state", "close", "observation", "error", "other", None])
BODIES = JSON | st.dictionaries(st.sampled_from(["observation", "reward", "done", "seed", "message", "code"]), JSON)
SHAPED = st.builds(lambda kind, data: {"type": kind, "data": data}, KINDS, BODIES)


@given(st.binary(max_size=60) | TEXT.map(str.encode) | (JSON | SHAPED).map(lambda value: json.dumps(value).encode()))
@example(b'{"type":"step","data":{"a":NaN}}')
@example(b'{"type":"observation","data":{"observation":{},"reward":1e999}}')
@example(b'{"type":"step"}')
@example(b"[" * 100_000)
@example(b'{"type":"reset","data":{"seed":1e30}}')
@example(b'{"type":"reset","data":{"seed":1,"extra":2}}')
@example(b'\xff{"type":"close"}')
def test_decoders_take_any_bytes_and_raise_one_type(data: bytes) -> None:
    try:
        request = messages.decode_request(data)
        if isinstance(request, messages.StepRequest):
            assert isinstance(messages.action_from_wire(request.data).text, str)
    except MalformedMessage as error:
        assert error.code in ("INVALID_JSON", "VALIDATION_ERROR")
    try:
        reply = messages.decode_reply(data)
        if isinstance(reply, messages.ObservationReply):
            observation = messages.observation_from_wire(reply.data)
            assert observation.reward is None or math.isfinite(observation.reward)
        if isinstance(reply, messages.StateReply):
            assert messages.state_from_wire(reply.data).step_count >= 0
    except MalformedMessage as error:
        assert error.code in ("INVALID_JSON", "VALIDATION_ERROR")


def test_messages_have_openenvs_form() -> None:
    assert json.loads(messages.encode(messages.ResetRequest(messages.ResetData(3)))) == {
        "type": "reset",
        "data": {"seed": 3, "episode_id": None},
    }
    assert json.loads(messages.encode(messages.observation_to_wire(Observation(text="hi", fields={"a": 1})))) == {
        "type": "observation",
        "data": {"observation": {"a": 1, "text": "hi"}, "reward": None, "done": False},
    }


def test_an_observation_without_a_text_is_read_as_json() -> None:
    data = messages.ObservationData({"board": [1, 2], "metadata": {}}, reward=True)
    assert messages.observation_from_wire(data) == Observation(
        text='{"board":[1,2]}', fields={"board": [1, 2]}, reward=1.0
    )


async def episode(session: EnvironmentSession, seed: int) -> int:
    """Three steps and the end: how many steps the environment counted."""
    await session.reset(seed)
    for _ in range(3):
        await session.step("go")
    return int((await session.step("end")).text)


async def test_a_server_killed_in_an_episode_costs_that_episode() -> None:
    """The same client would go on in a fresh environment of the restarted server: it refuses instead."""
    with ServerProcess("misbehaving") as server:
        async with EnvironmentClient(server.url, timeout=2 * PATIENCE) as client:
            await client.reset(0)
            await client.step("go")
            killed = time.monotonic()
            server.kill()
            with pytest.raises(errors.EnvironmentDied, match="the connection is lost"):
                await client.step("go")
            assert time.monotonic() - killed < PATIENCE, "the end of the connection is seen, not the deadline"
            server.start()
            for call in (client.step("go"), client.reset(0)):
                with pytest.raises(errors.EnvironmentRefused, match="open another"):
                    await call
        async with EnvironmentClient(server.url, timeout=20.0) as client:
            assert await episode(client, 0) == 4


async def test_a_stopped_server_costs_one_deadline_and_is_used_again_when_it_goes_on() -> None:
    with ServerProcess("misbehaving") as stopped, ServerProcess("misbehaving") as other:
        async with EnvironmentPool([stopped.url, other.url], timeout=1.0) as pool:
            async with pool.session() as session:
                await session.reset(0)
                stopped.process.stop()  # the kernel takes connections for it, and nothing answers
                with pytest.raises(errors.EnvironmentHung, match="no answer for 1 s"):
                    await session.step("go")
                for seed in range(3):
                    assert await episode(session, seed) == 4
                assert [each.up for each in pool.servers] == [False, True]
            stopped.process.resume()
            await until(lambda: all(each.up for each in pool.servers))
            sessions = [pool.session() for _ in range(4)]
            assert await asyncio.gather(*[episode(each, 0) for each in sessions]) == [4] * 4
            assert [each.in_use for each in pool.servers] == [2, 2]
            for session in sessions:
                await session.close()
            assert [each.in_use for each in pool.servers] == [0, 0]


async def test_episodes_go_on_at_another_server_while_one_is_killed_again_and_again() -> None:
    """Six players; every episode is played, or fails by a typed error and is played again."""
    with ServerProcess("misbehaving") as victim, ServerProcess("misbehaving") as other:
        async with EnvironmentPool([victim.url, other.url], timeout=10.0) as pool:
            played, failed, stop = 0, 0, asyncio.Event()

            async def player() -> None:
                nonlocal played, failed
                async with pool.session() as session:
                    while not stop.is_set():
                        try:
                            assert await episode(session, 1) == 4
                            played += 1
                        except errors.EnvironmentFailed:
                            failed += 1

            players = [asyncio.ensure_future(player()) for _ in range(6)]
            for _ in range(3):
                before = played
                while played < before + 30:
                    await asyncio.sleep(0.01)
                victim.kill()
                await asyncio.to_thread(victim.start)
                await until(lambda: all(each.up for each in pool.servers))
            stop.set()
            await asyncio.gather(*players)
            assert failed <= 3 * 6, "a death costs the episodes that ran there"
            assert [each.in_use for each in pool.servers] == [0, 0]


async def test_without_a_server_a_reset_waits_and_then_says_what_it_tried() -> None:
    with ServerProcess("misbehaving") as server:
        async with EnvironmentPool([server.url], wait=0.5, timeout=5.0) as pool, pool.session() as session:
            await session.reset(0)
            server.kill()
            with pytest.raises(errors.EnvironmentDied):
                await session.step("go")
            with pytest.raises(errors.EnvironmentDied, match=r"no server was there for 0\.5 s: ws://"):
                await session.reset(0)
            server.start()
            pool.wait = 30.0
            assert await episode(session, 0) == 4


async def test_the_server_frees_the_sessions_of_a_client_that_is_killed(start: Callable[..., Child]) -> None:
    def play(pipe: Connection, url: str) -> None:
        async def begin() -> None:
            await EnvironmentClient(url).reset(0)
            pipe.send("there")
            await asyncio.sleep(600.0)

        asyncio.run(begin())

    async with EnvironmentServer(Misbehaving, "test", sessions=1) as server:
        child = start(play, server.url)
        assert await asyncio.to_thread(child.hear) == "there"
        async with EnvironmentClient(server.url) as client:
            with pytest.raises(errors.EnvironmentBusy, match="all of the 1 session of test are taken"):
                await client.reset(0)
        child.kill()
        await until(lambda: not server.health().sessions)
        async with EnvironmentClient(server.url) as client:
            await client.reset(0)


async def test_a_pool_waits_for_a_free_session_and_one_that_stays_full_is_busy() -> None:
    async with (
        EnvironmentServer(Misbehaving, "test", sessions=1) as server,
        EnvironmentPool([server.url], wait=0.4) as pool,
    ):
        one, two = pool.session(), pool.session()
        await one.reset(0)
        with pytest.raises(errors.EnvironmentBusy):
            await two.reset(0)
        pool.wait = 30.0
        waiting = asyncio.ensure_future(episode(two, 0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await one.close()
        assert await waiting == 4
        await two.close()
        assert pool.servers[0].failures == 0


async def test_a_pool_waits_for_a_place_that_a_client_of_another_pool_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks again and again for all of `wait`, and not as often as it tries other environments."""
    refusals, release = [], EnvironmentPool.release

    def counted(pool: EnvironmentPool, server: Any, client: Any, error: BaseException | None = None) -> Any:
        refusals.extend([error] if isinstance(error, errors.EnvironmentBusy) else [])
        return release(pool, server, client, error)

    monkeypatch.setattr(EnvironmentPool, "release", counted)
    monkeypatch.setattr("holdfast.rl.environments.client.BUSY_SECONDS", 0.01)
    async with (
        EnvironmentServer(Misbehaving, "test", sessions=1) as server,
        EnvironmentClient(server.url) as other,
        EnvironmentPool([server.url], wait=PATIENCE) as pool,
        pool.session() as session,
    ):
        await other.reset(0)
        waiting = asyncio.ensure_future(episode(session, 0))
        await until(lambda: waiting.done() or len(refusals) > 5)
        await other.close()
        assert await waiting == 4
        assert pool.servers[0].up and pool.servers[0].failures == 0


async def test_a_server_that_can_begin_no_episode_is_avoided() -> None:
    """It has the fewest sessions at all times: without that it would get them all."""
    async with (
        EnvironmentServer(lambda: Misbehaving("nan"), "liar") as liar,
        EnvironmentServer(Misbehaving, "honest") as honest,
        EnvironmentPool([liar.url, honest.url]) as pool,
    ):
        async with pool.session() as session:
            assert await episode(session, 0) == 4
        assert [each.up for each in pool.servers] == [False, True]
        assert "reset: reward=nan is no finite number" in pool.servers[0].last_failure
        for _ in range(5):
            async with pool.session() as session:
                assert await episode(session, 0) == 4
        assert pool.servers[0].failures == 1


async def test_a_step_that_raises_is_no_reason_to_avoid_a_server() -> None:
    """Its place is free for the next episode: the server has no other."""
    async with EnvironmentServer(Misbehaving, "test", sessions=1) as server, EnvironmentPool([server.url]) as pool:
        async with pool.session() as session:
            for _ in range(5):
                await session.reset(0)
                with pytest.raises(errors.EnvironmentDied, match="ZeroDivisionError"):
                    await session.step("raise")
                assert pool.servers[0].up
        await pool.close()
        assert pool.servers[0].in_use == 0
        assert pool.servers[0].failures == 5


async def test_servers_are_exchanged_while_sessions_run() -> None:
    async with (
        EnvironmentServer(Misbehaving, "one") as one,
        EnvironmentServer(Misbehaving, "two") as two,
        EnvironmentPool([one.url]) as pool,
        pool.session() as session,
    ):
        await session.reset(0)
        pool.set_servers([two.url])
        assert (await session.step("go")).text == "1"
        async with pool.session() as other:
            await other.reset(0)
            assert two.health().sessions == 1
        assert [each.url for each in pool.servers] == [two.url]


async def test_a_session_that_is_kept_plays_the_next_episode_and_ends_with_its_server() -> None:
    with ServerProcess("misbehaving") as server:
        async with EnvironmentPool([server.url], keep=True, timeout=20.0) as pool:
            async with pool.session() as session:
                assert await episode(session, 0) == 4
            [kept] = pool.servers[0].idle
            async with pool.session() as session:
                assert await episode(session, 1) == 4 and not pool.servers[0].idle
            assert pool.servers[0].idle == [kept]
            async with pool.session() as session:
                await session.reset(0)
                with pytest.raises(errors.EnvironmentDied):
                    await session.step("raise")
                await session.reset(0)
            [other] = pool.servers[0].idle
            assert other is not kept, "one that failed is never used again"
            server.kill()
            server.start()
            async with pool.session() as session:
                assert await episode(session, 2) == 4, "the one that was kept is lost, and another takes its place"
            assert pool.servers[0].in_use == 0


async def test_a_pool_closes_although_a_session_fails_meanwhile() -> None:
    pool = EnvironmentPool(["ws://127.0.0.1:9"])
    [server] = pool.servers
    pool.release(server, EnvironmentClient(server.url))
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    assert not closing.done()
    pool.release(server, EnvironmentClient(server.url), errors.EnvironmentDied(server.url, "connect", "it is away"))
    await asyncio.wait_for(closing, PATIENCE)
