"""A server records what its sessions' calls took."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")

from holdfast.rl.environments.builtin import GuessNumberEnvironment
from holdfast.rl.environments.client import EnvironmentClient
from holdfast.rl.environments.environment import Action, Observation
from holdfast.rl.environments.server import EnvironmentServer
from holdfast.rl.telemetry import FOLD_SECONDS, WorkLog


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
        assert all(each.ago >= each.seconds >= 0 for each in report.spans)
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
    first = work.report()
    [span] = first.spans
    assert span.number == 2 and span.seconds == pytest.approx(span.ago) and span.seconds >= 0.1
    end.set()
    for each in threads:
        each.join()
    [rest] = work.report().spans
    assert rest.number == 2 and rest.seconds + rest.ago < first.spans[0].seconds + 60.0
