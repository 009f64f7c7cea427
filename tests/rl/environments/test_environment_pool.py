"""Pools over real server processes that are killed, stopped and started again: each fault costs an episode at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")

from holdfast.rl.environments.client import EnvironmentClient, EnvironmentPool
from holdfast.rl.environments.server import EnvironmentServer
from holdfast.rl.environments.session import EnvironmentSession
from holdfast.rl.errors import (
    EnvironmentBusy,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentHung,
    EnvironmentRefused,
    UnknownEnvironment,
)
from support.children import Child
from support.rl.environment_servers import Misbehaving, server_process
from support.rl.event_loop import until
from support.waiting import PATIENCE


async def episode(session: EnvironmentSession, seed: int) -> int:
    """Three steps and the end: how many steps the environment counted."""
    await session.reset(seed)
    for _ in range(3):
        await session.step("go")
    return int((await session.step("end")).text)


async def test_a_server_killed_in_an_episode_costs_that_episode() -> None:
    """The same client would go on in a fresh environment of the restarted server: it refuses instead."""
    with server_process("misbehaving") as server:
        async with EnvironmentClient(server.url, timeout=2 * PATIENCE) as client:
            await client.reset(0)
            await client.step("go")
            killed = time.monotonic()
            server.kill()
            with pytest.raises(EnvironmentDied, match="the connection is lost"):
                await client.step("go")
            assert time.monotonic() - killed < PATIENCE, "the end of the connection is seen, not the deadline"
            server.start()
            for call in (client.step("go"), client.reset(0)):
                with pytest.raises(EnvironmentRefused, match="open another"):
                    await call
        async with EnvironmentClient(server.url, timeout=20.0) as client:
            assert await episode(client, 0) == 4


async def test_a_stopped_server_costs_one_deadline_and_is_used_again_when_it_goes_on() -> None:
    with server_process("misbehaving") as stopped, server_process("misbehaving") as other:
        async with EnvironmentPool([stopped.url, other.url], timeout=1.0) as pool:
            async with pool.session() as session:
                await session.reset(0)
                stopped.stop()
                with pytest.raises(EnvironmentHung, match="no answer for 1 s"):
                    await session.step("go")
                for seed in range(3):
                    assert await episode(session, seed) == 4
                assert [each.up for each in pool.servers] == [False, True]
            stopped.resume()
            await until(lambda: all(each.up for each in pool.servers), 40.0)
            sessions = [pool.session() for _ in range(4)]
            assert await asyncio.gather(*[episode(each, 0) for each in sessions]) == [4] * 4
            assert [each.in_use for each in pool.servers] == [2, 2]
            for session in sessions:
                await session.close()
            assert [each.in_use for each in pool.servers] == [0, 0]


async def test_episodes_go_on_at_another_server_while_one_is_killed_again_and_again() -> None:
    """Six players; every episode is played, or fails by a typed error and is played again."""
    with server_process("misbehaving") as victim, server_process("misbehaving") as other:
        async with EnvironmentPool([victim.url, other.url], timeout=10.0) as pool:
            played, failed, stop = 0, 0, asyncio.Event()

            async def player() -> None:
                nonlocal played, failed
                async with pool.session() as session:
                    while not stop.is_set():
                        try:
                            assert await episode(session, 1) == 4
                            played += 1
                        except EnvironmentFailed:
                            failed += 1

            players = [asyncio.ensure_future(player()) for _ in range(6)]
            for _ in range(3):
                before = played
                while played < before + 30:
                    await asyncio.sleep(0.01)
                victim.kill()
                await asyncio.to_thread(victim.start)
                await until(lambda: all(each.up for each in pool.servers), 40.0)
            stop.set()
            await asyncio.gather(*players)
            assert failed <= 3 * 6, "a death costs the episodes that ran there"
            assert [each.in_use for each in pool.servers] == [0, 0]


async def test_without_a_server_a_reset_waits_and_then_says_what_it_tried() -> None:
    with server_process("misbehaving") as server:
        async with EnvironmentPool([server.url], wait=0.5, timeout=5.0) as pool, pool.session() as session:
            await session.reset(0)
            server.kill()
            with pytest.raises(EnvironmentDied):
                await session.step("go")
            with pytest.raises(EnvironmentDied, match=r"no server was there for 0\.5 s: ws://"):
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
            with pytest.raises(EnvironmentBusy, match="all of the 1 session of test are taken"):
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
        with pytest.raises(EnvironmentBusy):
            await two.reset(0)
        pool.wait = 30.0
        waiting = asyncio.ensure_future(episode(two, 0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await one.close()
        assert await waiting == 4
        await two.close()
        assert pool.servers[0].failures == 0


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
    async with EnvironmentServer(Misbehaving, "test") as server, EnvironmentPool([server.url]) as pool:
        async with pool.session() as session:
            for _ in range(5):
                await session.reset(0)
                with pytest.raises(EnvironmentDied, match="ZeroDivisionError"):
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
    with server_process("misbehaving") as server:
        async with EnvironmentPool([server.url], keep=True, timeout=20.0) as pool:
            async with pool.session() as session:
                assert await episode(session, 0) == 4
            [kept] = pool.servers[0].idle
            async with pool.session() as session:
                assert await episode(session, 1) == 4 and not pool.servers[0].idle
            assert pool.servers[0].idle == [kept]
            async with pool.session() as session:
                await session.reset(0)
                with pytest.raises(EnvironmentDied):
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
    pool.release(server, EnvironmentClient(server.url), EnvironmentDied(server.url, "connect", "it is away"))
    await asyncio.wait_for(closing, PATIENCE)


async def test_a_pool_without_servers_is_refused() -> None:
    with pytest.raises(UnknownEnvironment):
        EnvironmentPool([])
