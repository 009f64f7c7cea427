"""The parts of services that need no process: routing, options, metrics."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ft.registers import RegisterAway
from holdfast.ft.registers.etcd import OtherCluster
from holdfast.rl.actors.errors import ActorDied, ActorStartFailed, EndpointFailed
from holdfast.rl.actors.replicas import (
    ReplicaStatus,
    RouteChoice,
    ServiceOptions,
    ServiceReplica,
    choose,
)
from holdfast.rl.actors.service import ServiceMetrics, ServiceStatus
from holdfast.rl.generators.errors import GenerationTimeout, VersionGone
from holdfast.store import StoreTimeout

SLOTS = st.integers(1, 8)


def replicas(count: int, concurrency: int = 4) -> list[ServiceReplica]:
    """Replicas that are ready, without processes."""
    options = ServiceOptions(concurrency=concurrency)
    found = [ServiceReplica(f"policy-{slot}", slot, options, lambda replica, served: None) for slot in range(count)]
    for each in found:
        each.health = "ready"
    return found


@given(SLOTS, st.integers(1, 5), st.integers(1, 60))
def test_no_replica_has_too_many_calls_and_none_is_idle_while_calls_wait(
    count: int, concurrency: int, calls: int
) -> None:
    ready = replicas(count, concurrency)
    for given_out in range(calls):
        found = choose(ready, RouteChoice())
        assert (found is None) == (given_out >= count * concurrency)
        assert max(each.load for each in ready) <= concurrency
        assert max(each.load for each in ready) - min(each.load for each in ready) <= 1


@given(st.integers(2, 8), st.lists(st.integers(), min_size=1, max_size=50), st.data())
def test_only_the_keys_of_a_lost_replica_move(count: int, keys: list[int], data: st.DataObject) -> None:
    def homes(among: list[ServiceReplica]) -> dict[int, int]:
        return {key: chosen.slot for key in keys if (chosen := choose(among, RouteChoice(key=key))) is not None}

    before = homes(replicas(count, 1000))
    lost = data.draw(st.integers(0, count - 1))
    after = homes([each for each in replicas(count, 1000) if each.slot != lost])
    assert all(after[key] == home for key, home in before.items() if home != lost)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_replicas": 0}, "num_replicas=0"),
        ({"tries": 0}, "tries=0"),
        ({"silence": 0.0}, "silence=0.0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"deadline": -1.0}, "deadline=-1.0"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServiceOptions(**wrong)


def test_metrics_show_services_and_replicas() -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'holdfast[metrics]'")
    replica = ReplicaStatus(name="policy-1.2", slot=1, host="", pid=7, health="ready", load=3, version=None, restarts=2)
    status = ServiceStatus(
        name="policy", version=4, replicas=(replica,), queued=5, calls=60, retried=7, overloaded=8, lost=2
    )
    metrics = ServiceMetrics("0", lambda: (status,))
    try:
        with urllib.request.urlopen(metrics.url, timeout=30.0) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        metrics.close()
    assert {
        'holdfast_service_calls_total{service="policy"} 60.0',
        'holdfast_service_lost_total{service="policy"} 2.0',
        'holdfast_service_queued{service="policy"} 5.0',
        'holdfast_service_version{service="policy"} 4.0',
        'holdfast_replica_ready{replica="1",service="policy"} 1.0',
        'holdfast_replica_load{replica="1",service="policy"} 3.0',
        'holdfast_replica_restarts{replica="1",service="policy"} 2.0',
        'holdfast_replica_version{replica="1",service="policy"} -1.0',
    } <= set(lines)


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (GenerationTimeout(1.0, 4), True),
        (RegisterAway("sqlite:///x", "gone"), True),
        (OtherCluster("etcd://x", "another"), False),
        (StoreTimeout("get", 1, 1.0, "why"), True),
        (VersionGone(1, [2]), False),
        (ActorDied("a", 1, "killed", "f"), True),
        (ValueError("no"), False),
    ],
)
def test_the_class_of_an_error_says_whether_it_is_tried_again(error: Exception, retried: bool) -> None:
    failed, unstarted = EndpointFailed("a", "f", "s", "t"), ActorStartFailed("a", "why")
    failed.__cause__ = unstarted.__cause__ = error
    assert getattr(error, "retryable", False) == failed.retryable == unstarted.retryable == retried
