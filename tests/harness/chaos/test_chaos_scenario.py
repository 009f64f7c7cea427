"""Scenario files: what they may say, how they are refused, and the schedules that seeds make of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.plugins.spec import hookimpl
from holdfast.ft.membership.view import Job, View
from holdfast.ft.node.register import Register
from holdfast.ft.registers import RegisterAway
from holdfast.harness import chaos
from holdfast.harness.chaos.command import _ids
from holdfast.harness.chaos.fault_type import fault_types
from holdfast.harness.chaos.outcome.checks import RegisterAwayBreaksNothing
from holdfast.harness.chaos.run.fault_context import etcd_server, tcp_server
from holdfast.harness.chaos.scenario import (
    BadScenario,
    JobSpec,
    Scenario,
    encoded,
    find_scenario,
    load,
    parse,
    scenario_names,
    scenario_path,
    schedule,
    text_of,
)
from holdfast.harness.chaos.workload import Python, ReinforcementLearning
from holdfast.harness.cluster.job import Job as LocalJob
from holdfast.harness.cluster.job import ViewCache
from holdfast.harness.invariants import Bounds
from holdfast.harness.links.policy import unbreakable
from support.comms.meeting import registered
from support.event_records import an_event
from support.programs.forked_programs import said_as_json
from support.source_tree import ROOT
from support.waiting import eventually

SMALLEST = """
title = "nothing happens"

[workload]
kind = "all_reduce"
"""

BROKEN = """
title = "a kill"

[workload]
kind = "all_reduce"
steps = 100

[job]
ranks = 3

[[fault]]
type = "kill"
who = 1
at.step = 40

[[fault]]
type = "pause"
who = "random"
at = { random = [0.2, 0.8] }
lasts = 0.5
"""


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


# -- what they say


def test_a_title_and_a_workload_are_enough_and_faults_have_a_type_a_moment_and_keys_of_their_own() -> None:
    scenario = parsed(SMALLEST)
    assert (scenario.job.ranks, scenario.expect.verdict, scenario.faults) == (3, "held", ())
    kill, pause = parsed(BROKEN).faults
    assert (kill.type, kill.at.step, kill.lasts) == ("kill", 40, None)
    assert (pause.type, pause.at.random, pause.lasts) == ("pause", (0.2, 0.8), 0.5)


def test_a_workload_of_any_kind_runs_for_as_many_steps_as_the_minutes_have() -> None:
    for name in ("kill-rank", "ddp-kill", "store-holder-killed", "rl-generator-killed"):
        workload = find_scenario(name).workload
        longer = workload.with_steps(1234)
        assert longer.steps == 1234
        assert type(longer) is type(workload)
    in_fours = ReinforcementLearning(run={"algorithm": {"updates": 4, "staleness": 4}})
    assert in_fours.with_steps(9).steps == 12, "whole batches"
    with pytest.raises(ValueError, match="minutes cannot be given"):
        Python(target="job:train").with_steps(5)


def test_scenarios_that_come_with_holdfast_can_be_read_and_scheduled_and_differ_and_lie_in_the_root_too() -> None:
    scenarios = [find_scenario(name) for name in scenario_names()]
    for each in scenarios:
        assert each.summary.strip(), f"{each.name} says what it shows"
        seconds = None if each.minutes is None else 60 * each.minutes
        assert schedule(each, 3, seconds=seconds), f"{each.name} breaks something"
    assert len({each.title for each in scenarios}) == len(scenarios) >= 15
    soak = schedule(find_scenario("soak"), 0, seconds=600.0)
    assert {each.when.seconds or 0.0 for each in soak} >= {29.0 * number for number in range(1, 21)}
    used = {fault.type for each in scenarios for fault in each.faults}
    assert used >= set(fault_types()), "every fault type is shown in one"
    assert (ROOT / "scenarios").resolve() == (ROOT / "harness" / "chaos" / "scenarios").resolve()


# -- how they are refused


TRAINER_KILLED, HOST_LOST = (text_of(scenario_path(f"rl-{name}")) for name in ("trainer-killed", "host-lost"))
WRONG = {
    BROKEN: [
        (("ranks = 3", "rank = 3"), 9, "job.rank: no such field; did you mean 'ranks'?"),
        (("ranks = 3", "ranks = 0"), 9, "job.ranks: 0 is not allowed: expected `int` >= 1"),
        (("all_reduce", "all_reduced"), 5, "workload.kind: 'all_reduced' is not allowed: expected 'all_reduce'"),
        (('type = "kill"', 'type = "murder"'), 12, "no fault type 'murder'; there are corrupt,"),
        (("who = 1", "whom = 1"), 13, "fault[0].whom: no such field; did you mean 'who'?"),
        (("who = 1", "who = 7"), 11, "fault 1: who = 7: no such rank (3 ranks)"),
        (("who = 1", 'who = "nobody"'), 11, "there are random, coordinator, last, spare, joiner"),
        (("at.step = 40", "at.step = 400"), 11, "at.step = 400, but the workload has 100 steps"),
        (("at.step = 40", "at.steps = 40"), 14, "fault[0].at.steps: no such field; did you mean 'step'?"),
        (("at.step = 40", 'at.point = "somewhere"'), 11, "no point 'somewhere'; there are step.begin"),
        (("at.step = 40", 'at.point = "loop.after_step"'), 11, 'reached by a workload of kind = "rl" only'),
        (("at.step = 40", ""), 11, "a fault says when by `at`"),
        (('type = "kill"\n', ""), 11, "a fault needs a `type`; there are corrupt,"),
        (("{ random = [0.2, 0.8] }", "{ random = [0.8, 0.2] }"), 19, "must not be above the second"),
        (("{ random = [0.2, 0.8] }", "{ step = 3, seconds = 1.0 }"), 19, "exactly one of"),
        (("lasts = 0.5", "lasts = -1.0"), 16, "lasts = -1.0 must be positive"),
        (("[job]", "[jobs]"), 8, "jobs: no such field; did you mean 'job'?"),
        (("ranks = 3", "ranks = "), 9, "not TOML"),
        (("ranks = 3", '"" = 3'), 9, 'job."": no such field'),
        (('type = "kill"', "type = [1]"), 12, "no fault type [1]; there are corrupt,"),
        (("lasts = 0.5", "lasts = nan"), 20, "fault[1].lasts: nan is not a number to work with"),
        (("ranks = 3", "ranks = 3\ntimeouts = { suspect = inf }"), 10, "job.timeouts.suspect: inf"),
        (("ranks = 3", "ranks = 3\ntimeouts.suspect = 0.01"), 10, "must be at least twice heartbeat"),
        (("ranks = 3", "ranks = 3\nmin_size = 5"), 10, "min_size = 5: the job has 3 ranks only"),
        (("ranks = 3", "ranks = 3\n[expect]\nrebuilds = [3, 1]"), 11, "rebuilds = [3, 1]: write [least, most]"),
    ],
    AWAY: [
        (('= "etcd"', '= "redis"'), 9, "job.register: 'redis' is not allowed: expected 'etcd', 'sqlite', 'tcp'"),
        (('register = "etcd"', "register_nodes = 2"), 9, "job.register_nodes: 2 is not allowed: expected 1, 3"),
        (('register = "etcd"', "register_nodes = 3"), 9, 'register_nodes = 3: only register = "etcd" has more'),
        (('"etcd"', '"tcp"\nhosts = "namespaces"'), 9, 'register = "tcp" listens on this host'),
        (('"stopped"', '"asleep"'), 13, "how: 'asleep' is not allowed: expected 'gone', 'leader-killed'"),
        (('"stopped"', '"locked"'), 11, 'how = "locked" cannot happen to job.register = "etcd", only "stopped" or'),
        (('"etcd"', '"sqlite"'), 11, 'how = "stopped" cannot happen to job.register = "sqlite", only "locked" or'),
        (("[job]", '[expect]\nverdict = "broken"\n[job]'), 9, "comes with the names"),
        (('"stopped"', '"leader-killed"'), 11, "needs nodes that elect another: job.register_nodes = 3"),
    ],
    TRAINER_KILLED: [
        (("\nsteps = 24", "\nstep = 24"), 12, "workload.run.step: no such field; did you mean 'steps'?"),
        (("groups = 8", "groups = 0"), 20, "workload.run.algorithm.groups: 0 is not allowed"),
        (('"synchronous"', '"asynchronous"'), 38, 'only the loop of workload.run.algorithm.mode = "synchronous"'),
        (('kind = "rl"', 'kind = "rl"\nsteps = 3'), 10, "workload.steps: no such field; did you mean"),
        (("[[fault]]", "[job]\nranks = 2\n[[fault]]"), 32, "its processes in workload.run"),
        (("train.in_reduction", "train.somewhere"), 32, "no point 'train.somewhere'"),
        (("at.point", 'who = "reader"\nat.point'), 32, "there are driver, trainer, spare, generator, holder"),
    ],
    HOST_LOST: [
        (("hosts = 3\n", ""), 41, "host-lost needs job.hosts"),
        (('"host-lost"', '"host-lost"\nhost = 3'), 42, "host = 3: there are hosts 0 to 2"),
        (('"host-lost"', '"host-lost"\nhost = 0'), 42, "host = 0: the driver is there"),
        (('backend = "ucx"', 'backend = "shm"'), 30, "workload.run.trainer.backend: shm is memory of one host"),
        (("silence = 3.0", 'kind = "local"'), 39, "workload.run.engine.hosts: the local engine"),
    ],
}
"""What is changed in a scenario, the line that is named, and what is said."""


@pytest.mark.parametrize(
    ("text", "change", "line", "words"), [(text, *row) for text, rows in WRONG.items() for row in rows]
)
def test_a_wrong_value_is_refused_with_its_line_and_what_is_allowed(
    text: str, change: tuple[str, str], line: int, words: str
) -> None:
    with pytest.raises(BadScenario) as caught:
        parsed(text.replace(*change))
    assert caught.value.line == line, str(caught.value)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"mine.toml:{line}: ")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000])
def test_what_the_parser_of_toml_gives_up_on_is_refused_too(value: str) -> None:
    with pytest.raises(BadScenario, match=r"mine\.toml: not TOML: "):
        parsed(f"limit = {value}")


def test_a_byte_order_mark_and_crlf_are_accepted_and_what_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbf" + BROKEN.replace("\n", "\r\n").encode())
    assert load(path).title == "a kill"
    path.write_bytes(BROKEN.encode().replace(b"a kill", b"caf\xe9"))
    with pytest.raises(BadScenario, match=r"a\.toml:2: not UTF-8"):
        load(path)


OWN = """
title = "x"
[workload]
kind = "python"
target = "train.py:train"
arguments = { limit = inf }
"""


def test_a_target_path_is_relative_to_the_scenario_file_and_arguments_may_be_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.toml").write_text(OWN)
    with pytest.raises(BadScenario, match=r"mine\.toml:5: target = 'train\.py:train': there is no file"):
        load(tmp_path / "mine.toml")
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path / "elsewhere")
    workload = load(Path("../mine.toml")).workload
    assert isinstance(workload, Python) and workload.arguments == {"limit": float("inf")}
    assert Path(workload.target.rpartition(":")[0]).resolve() == tmp_path / "train.py"


def test_a_random_step_needs_a_known_number_of_steps() -> None:
    scenario = parsed(OWN.replace("train.py", "train") + '[[fault]]\ntype = "kill"\nwho = 0\nat.random = [0.2, 0.8]\n')
    with pytest.raises(ValueError, match=r"say so by `steps` in \[workload\], or steps="):
        schedule(scenario, 0)


def test_two_files_of_one_name_are_two_runs() -> None:
    paths = [Path("/a/kill.toml"), Path("/b/kill.toml"), Path("/b/kill.toml"), Path("/b/cut.toml")]
    assert _ids(["kill", "kill", "kill", "cut"], paths) == ["a-kill", "b-kill", "b-kill-3", "cut"]


LINKED = SMALLEST + '[job]\nbackend = "{}"\nlinks = true\n[[fault]]\ntype = "partition"\ngroups = [[0]]\nat.step = 3\n'


@pytest.mark.parametrize("backend", ["ucx", "mpi", "ucx,gloo", "inproc"])
def test_link_faults_are_refused_for_backends_that_do_not_use_tcp_alone(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    with pytest.raises(BadScenario, match=f"the {backend[:3]}.* backend has no links to break"):
        parsed(LINKED.format(backend))
    job: Any = SimpleNamespace(_links=object(), _settings=SimpleNamespace(backend=backend, environ={}))
    with pytest.raises(Unsupported, match="has no links to break"):
        LocalJob.partition(job, [0], [1])


def test_links_of_ucx_can_be_broken_where_it_uses_tcp_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    for tls, breakable in {"tcp,self": True, "tcp": True, "self,posix,tcp": False, "all": False}.items():
        assert (unbreakable("ucx", {"UCX_TLS": tls}) is None) == breakable, tls
    assert unbreakable("ucx", {}, many_hosts=True) is None


def test_faults_of_links_need_links() -> None:
    text = BROKEN.replace('type = "kill"\nwho = 1', 'type = "cut"\nsource = 1')
    with pytest.raises(BadScenario, match="links = true"):
        parsed(text)
    with pytest.raises(BadScenario, match="the shm backend has no links"):
        parsed(text.replace("ranks = 3", "ranks = 3\nlinks = true"))
    linked = text.replace("ranks = 3", 'ranks = 3\nlinks = true\nbackend = "gloo"')
    with pytest.raises(BadScenario, match="it is not evicted, and the job waits for it; give `lasts`"):
        parsed(linked)
    assert parsed(linked.replace("source = 1", "source = 1\nlasts = 0.5")).faults
    assert parsed(linked.replace("source = 1", 'source = 1\nplane = "control"')).faults
    assert parsed(linked.replace("links = true", 'links = true\nhosts = "many"')).faults


def test_the_page_has_every_fault_type_of_the_command_with_its_keys() -> None:
    page = (ROOT / "docs/reference/scenarios.md").read_text().partition("## `[[fault]]`: what")[2].partition("\n## ")[0]
    rows = {
        row[0]: set(row[2].split()) for row in re.findall(r"^\| `([a-z-]+)` \| (.*) \| (?:`(.*)`)? ?\|$", page, re.M)
    }
    listed = said_as_json("chaos", "list")["faults"]
    assert rows == {name: set(kind["keys"]) for name, kind in listed.items()}


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parsed(text)
    except BadScenario:
        pass


@given(st.integers(min_value=0, max_value=1 << 40))
def test_the_same_seed_gives_the_same_schedule_within_the_ranges_of_the_scenario(seed: int) -> None:
    """A fault that is added changes no earlier one."""
    planned = schedule(parsed(BROKEN), seed)
    assert encoded(planned) == encoded(schedule(parsed(BROKEN), seed))
    _, pause = planned
    assert 20 <= (pause.when.step or 0) <= 79
    (who,) = pause.what.names  # type: ignore[attr-defined]
    assert who in range(3)
    more = BROKEN + '\n[[fault]]\ntype = "kill"\nwho = "random"\nat.random = [0.0, 1.0]\n'
    assert schedule(parsed(more), seed)[:2] == planned
    (two,) = schedule(find_scenario("two-at-once"), seed)
    assert len(set(two.what.names)) == 2, "two random ranks are different"  # type: ignore[attr-defined]


def test_other_seeds_give_other_schedules_and_every_process_draws_the_same() -> None:
    assert len({encoded(schedule(parsed(BROKEN), seed)) for seed in range(20)}) > 15
    drawn = [schedule(find_scenario("two-at-once"), seed)[0] for seed in (3, 11)]
    assert [(each.when.step, each.what.names) for each in drawn] == [(95, (2, 0)), (86, (0, 3))]  # type: ignore[attr-defined]


class Plain(chaos.FaultType, frozen=True, kw_only=True):
    """Breaks nothing; only notes that it was injected."""

    summary: ClassVar[str] = "nothing at all"
    times: int = 1

    def inject(self, context: chaos.FaultContext) -> None:
        context.note("nothing", [])


def test_a_plugin_adds_a_fault_type_and_a_broken_plugin_is_left_out() -> None:
    def fail() -> None:
        raise RuntimeError("not today")

    offers = {"plain": Plain, "no-fault": int}
    one, other = (SimpleNamespace(holdfast_faults=hookimpl(each)) for each in (lambda: offers, fail))
    with registered(one), registered(other):
        scenario = parsed(SMALLEST + '[[fault]]\ntype = "plain"\ntimes = 2\nat.step = 3\n')
        assert isinstance(scenario.faults[0].what, Plain)
        assert "no-fault" not in fault_types()
        assert "kill" in fault_types()


def test_faults_can_be_made_in_python() -> None:
    made = chaos.kill(1, step=40)
    assert msgspec.to_builtins(made.at)["step"] == 40
    late = chaos.fault("delay", seconds=0.01, source=1, step=3)
    assert (msgspec.to_builtins(late.what)["seconds"], late.at.seconds, late.at.step) == (0.01, None, 3)
    with pytest.raises(ValueError, match="exactly one of"):
        chaos.kill(1)
    with pytest.raises(ValueError, match=r"unknown field `whom`.*its keys are who"):
        chaos.fault("kill", whom=1, step=3)


def test_a_register_is_a_file_unless_the_scenario_says_otherwise() -> None:
    assert parsed(AWAY.partition("[job]")[0]).job == JobSpec()
    three = parsed(AWAY.replace('"stopped"', '"leader-killed"').replace('"etcd"', '"etcd"\nregister_nodes = 3'))
    assert three.job.register == "etcd"
    assert three.faults[0].what.words() == "register away: leader-killed"


VIEW = View(1, "running", (), Job("job", 1, 1, 1, ("shm",), "shm"), "test")


def test_reads_do_not_wait_for_a_stopped_tcp_register_which_is_away_once_its_server_is_closed(tmp_path: Path) -> None:
    with tcp_server(tmp_path) as server, Register.open(server.url) as register:
        following = ViewCache(Register.open(server.url))
        try:
            assert register.compare_and_set(0, VIEW)
            eventually(lambda: following.newest() == VIEW)
            server.pause()
            assert following.newest() == VIEW
            server.resume()
            assert register.read() == VIEW
            with pytest.raises(HoldfastError, match="nobody takes over"):
                server.kill_leader()
        finally:
            following.close()
        late = Register.open(server.url)
    with late, pytest.raises(RegisterAway):
        late.read()


def test_a_leader_of_etcd_that_was_killed_comes_back(tmp_path: Path) -> None:
    with etcd_server(3, tmp_path) as server, Register.open(server.url) as register:
        server.kill_leader()()
        assert register.compare_and_set(0, VIEW)
        server.kill_leader()
        assert register.read() == VIEW


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


def run(name: str) -> Any:
    """Run the scenario; checks the outcome, and that steps were committed while the register was away."""
    report = chaos.run_scenario(find_scenario(name)).check().report
    (looked,) = [each.looked for each in report.findings if each.invariant == RegisterAwayBreaksNothing.name]
    assert looked > 0
    return report


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["register-tcp-stopped", "register-etcd-stopped"])
def test_a_register_that_is_stopped_delays_a_rebuild_and_breaks_nothing(name: str) -> None:
    away, kill = run(name).strikes
    (seconds,) = [stage.seconds for stage in kill.stages if stage.name == "rebuilt"]
    assert away.time < kill.time < away.healed < kill.time + seconds


@pytest.mark.thorough
def test_the_other_nodes_of_etcd_take_over_from_a_leader_that_is_killed() -> None:
    report = run("register-etcd-leader")
    assert report.strikes[0].healed is None, "it is not its return that lets the job be rebuilt"
    assert [stage.name for stage in report.strikes[1].stages] == ["detected", "rebuilt", "resumed"]
