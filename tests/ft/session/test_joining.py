"""Joining a job: invalid arguments, late joiners, and sessions that leave nothing behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.comms import BackendUnavailable, HoldfastError, Mismatch
from holdfast.comms.system.keys import KeyRefused, create_key
from holdfast.ft import Attempt, Session, Timeouts, faultpoints, settings
from holdfast.ft.control.errors import WrongKey
from holdfast.ft.node.register import Register
from holdfast.ft.registers import RegisterAway
from holdfast.ft.state.fetching import BLOCK
from support.children import Child, children
from support.samples.tally import contract_in
from support.waiting import PATIENCE, eventually

QUICK = Timeouts(heartbeat=0.1, suspect=0.5, operation=10.0, rebuild=5.0, join=2.0)


@pytest.fixture
def contract(tmp_path: Path) -> dict[str, Any]:
    return contract_in(tmp_path, timeouts=QUICK)


def one_step(session: Session) -> int:
    for attempt in session.steps(1):
        with attempt:
            attempt.comm.barrier()
    return session.step


# -- invalid input is refused at once with the reason, and nothing is changed


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"job": None}, ValueError, "job is not given and HOLDFAST_JOB is not in the environment"),
        ({"register": None}, ValueError, "HOLDFAST_REGISTER"),
        ({"key_file": None}, ValueError, "HOLDFAST_KEY_FILE"),
        ({"key_file": "/nowhere/key"}, KeyRefused, "cannot be read"),
        ({"register": "carrier-pigeon://x"}, ValueError, "is not a register URL"),
        ({"register": "sqlite:///nowhere/at/all/x.sqlite"}, RegisterAway, "cannot open the file"),
        ({"size": 2, "min_size": 3}, ValueError, "min_size=3 is above size=2: the job could never run"),
        ({"size": 0}, ValueError, "size=0 is out of range"),
        ({"size": "2"}, TypeError, "size must be a whole number"),
        ({"min_size": 0}, ValueError, "min_size=0 is out of range"),
        ({"shards": -1}, ValueError, "shards=-1 is out of range"),
        ({"timeouts": 3.0}, TypeError, "timeouts must be a Timeouts"),
        ({"backend": "telepathy"}, BackendUnavailable, "known are"),
        ({"job": "x" * 200}, ValueError, "at most 100 printable characters"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    contract: dict[str, Any], change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Session(**{**contract, **change})


@pytest.mark.parametrize(
    ("variable", "value"),
    [(name, "perhaps") for name in ("HOLDFAST_CHECK", "HOLDFAST_SIZE", "HOLDFAST_MIN_SIZE", "HOLDFAST_SHARDS")]
    + [("HOLDFAST_MESH", "0")],
)
def test_a_variable_that_makes_no_sense_is_refused(
    contract: dict[str, Any], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable}='?{value}"):
        Session(**contract)


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments of a session whose register is in use, with size 1 and 4 shards."""
    used = contract_in(tmp_path_factory.mktemp("founded"), timeouts=QUICK)
    create_key(used["key_file"].with_name("other"))
    with Session(**used, size=1, shards=4) as founder:
        one_step(founder)
    return used


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"job": "other"}, Mismatch, "it belongs to job 'job', not to 'other'"),
        ({"size": 2}, Mismatch, "in use with size=1, not 2"),
        ({"shards": 7}, Mismatch, "in use with shards=4, not 7"),
        ({"backend": "gloo"}, Mismatch, "in use with backend='shm', not 'gloo'"),
        ({"timeouts": Timeouts(heartbeat=1.0, suspect=3.0)}, Mismatch, "in use with heartbeat=0.1, not 1.0"),
        ({"timeouts": replace(QUICK, join=3.0)}, Mismatch, "in use with join=2.0, not 3.0"),
        ({"HOLDFAST_MESH": "2"}, Mismatch, "in use with mesh=64, not 2"),
        ({"key_file": "other"}, WrongKey, "belongs to job 'job' with another key"),
    ],
)
def test_a_register_in_use_by_another_job_key_or_configuration_is_refused(
    founded: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    with Register.open(founded["register"]) as register:
        before = register.read()
    if "key_file" in change:
        change = {"key_file": founded["key_file"].with_name(change["key_file"])}
    if "HOLDFAST_MESH" in change:
        monkeypatch.setenv("HOLDFAST_MESH", change["HOLDFAST_MESH"])
        change = {}
    with pytest.raises(error, match=words):
        Session(**{**founded, **change})
    with Register.open(founded["register"]) as register:
        assert register.read() == before


def test_a_process_on_another_host_is_refused_by_a_job_of_one_host(
    contract: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(**contract, size=1) as founder:
        for attempt in founder.steps(1):
            with attempt, monkeypatch.context() as elsewhere:
                elsewhere.setattr(settings, "this_host", lambda: "elsewhere")
                with pytest.raises(BackendUnavailable, match="needs all members on one host"):
                    Session(**contract)


def test_an_attached_object_must_have_a_state(contract: dict[str, Any]) -> None:
    session = Session(**contract, size=1)
    with pytest.raises(TypeError, match="'numbers' cannot be attached: list has no state_dict"):
        session.attach("numbers", [1, 2])  # type: ignore[arg-type]
    session.attach("model", torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="attached as 'model' already"):
        session.attach("model", torch.nn.Linear(1, 1))


def test_bad_calls_of_steps_are_refused(contract: dict[str, Any]) -> None:
    with pytest.raises(HoldfastError, match="the session is not open"):
        Session(**contract, size=1).steps(3)
    with Session(**contract, size=1) as session:
        with pytest.raises(ValueError, match=r"steps\(-1\)"):
            session.steps(-1)
        assert session.view is None and session.rank is None and session.epoch is None
        assert list(session.steps(0)) == []
        with pytest.raises(HoldfastError, match="can be called once"):
            session.steps(1)
        with pytest.raises(HoldfastError, match="before steps"):
            session.attach("late", torch.nn.Linear(1, 1))


def test_an_attempt_must_be_entered_and_only_once(contract: dict[str, Any]) -> None:
    with Session(**contract, size=1) as session:
        seen: list[Attempt] = []
        with pytest.raises(HoldfastError, match="must be entered"):
            for attempt in session.steps(3):
                if seen:
                    continue
                seen.append(attempt)
                with attempt:
                    pass
        with pytest.raises(HoldfastError, match="made already"), seen[0]:
            pass


def test_a_job_that_no_other_process_joins_ends_with_the_reason(contract: dict[str, Any]) -> None:
    with Session(**contract, size=2, min_size=2) as session:
        began = time.monotonic()
        with pytest.raises(HoldfastError, match="1 of 2 members came within 2 s, 2 are needed"):
            one_step(session)
    assert 1.5 < time.monotonic() - began < PATIENCE
    with pytest.raises(HoldfastError, match="has ended: 1 of 2 members came"):
        Session(**contract, size=2, min_size=2)


def test_a_founder_raises_register_away_when_the_register_is_removed(contract: dict[str, Any], tmp_path: Path) -> None:
    contract["timeouts"] = Timeouts(heartbeat=0.1, suspect=0.2, operation=10.0, rebuild=0.5, join=0.5)
    with Session(**contract, size=2) as session:
        (tmp_path / "job.sqlite").unlink()
        with pytest.raises(RegisterAway, match="nobody runs the job, and nothing can be agreed"):
            one_step(session)


def test_a_job_begins_with_min_size_members_and_a_late_process_finds_nothing_to_do(contract: dict[str, Any]) -> None:
    with Session(**contract, size=2) as session:
        assert (one_step(session), session.size) == (1, 1)
    with Session(**contract, size=2) as late:
        assert list(late.steps(1)) == []


def test_a_spare_whose_job_died_raises_register_away_when_the_register_is_removed(
    contract: dict[str, Any], tmp_path: Path
) -> None:
    contract["timeouts"] = Timeouts(heartbeat=0.1, suspect=0.2, operation=10.0, rebuild=0.5, join=0.5)

    def linger(pipe: Any) -> None:
        with Session(**contract, size=1) as session:
            for attempt in session.steps(10**6):
                with attempt:
                    pipe.send("in a step")
                    time.sleep(0.05)

    with children() as start:
        member = start(linger)
        member.hear()
        with Session(**contract, size=1) as spare:
            (tmp_path / "job.sqlite").unlink()
            member.kill()
            with pytest.raises(RegisterAway, match="nobody runs the job, and nothing can be agreed"):
                one_step(spare)


# -- late joiners


def hear_until(child: Child, wanted: Callable[[Any], bool]) -> Any:
    while not wanted(message := child.hear()):
        pass
    return message


def step_until_three(pipe: Any, contract: dict[str, Any], gate: str, tells: bool) -> None:
    """Do steps, once the file `gate` exists, until three members have done one."""
    with Session(**contract, size=3, min_size=2) as session:
        pipe.send(("inside", 0))
        eventually(Path(gate).exists, 60.0)
        for attempt in session.steps(10**6):
            with attempt:
                attempt.comm.barrier()
                time.sleep(0.005)
            if attempt.committed and (tells or attempt.comm.size == 3):
                pipe.send(("step", attempt.comm.size))
            if attempt.committed and attempt.comm.size == 3:
                break


def test_members_do_not_wait_for_a_joiner_that_still_prepares_its_steps(
    contract: dict[str, Any], tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    with children() as start:
        first = [start(step_until_three, contract, str(tmp_path), tells) for tells in (True, False)]
        hear_until(first[0], lambda m: m == ("step", 2))
        joiner = start(step_until_three, contract, gate, False)
        assert joiner.hear() == ("inside", 0)
        inside = time.monotonic()
        while time.monotonic() < inside + 3 * QUICK.suspect:
            assert first[0].hear() == ("step", 2)
        Path(gate).touch()
        for child in (*first, joiner):
            hear_until(child, lambda m: m == ("step", 3))
            child.end()


# -- the transfer of the state to a joiner

BLOCKS = 12
"""The number of blocks of the state; each is read and checked at a time."""
LATE_STEPS = 160


def carry(pipe: Any, contract: dict[str, Any], gate: str, victim: int = 0) -> None:
    """Do short steps over a large state.

    In step 150 wait for the fourth member, or for `gate`. A joiner kills `victim` when it is about to read its third
    block.
    """
    weights = torch.arange(BLOCKS * BLOCK // 8, dtype=torch.float64)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(weights, requires_grad=False)})
    read = 0

    def kill_victim(point: str, step: int, rank: int, epoch: int) -> None:
        nonlocal read
        if point == "sync.before_chunk" and victim:
            read += 1
            if read == 3:
                os.kill(victim, 9)

    with Session(**contract, size=4, min_size=2) as session:
        faultpoints.arm(kill_victim)
        session.attach("model", model)
        session.subscribe(lambda event: pipe.send(event) if event["kind"] == "synced" else None)
        for attempt in session.steps(LATE_STEPS):
            with attempt:
                pipe.send({"kind": "step", "step": attempt.step})
                while attempt.step == 150 and attempt.comm.size < 4 and not Path(gate).exists():
                    attempt.comm.barrier()
                    time.sleep(0.002)
                time.sleep(0.003)
                attempt.comm.barrier()
            if attempt.committed:
                model["w"][attempt.step] += attempt.step
        faultpoints.arm(None)
        pipe.send({"kind": "end", "sum": model["w"].sum().item(), "read": read})


def test_a_source_that_dies_during_the_transfer_is_replaced_without_a_restart(
    contract: dict[str, Any], tmp_path: Path
) -> None:
    """A fourth process joins three, of which it kills the first when it has two of its blocks."""
    gate = tmp_path / "gate"

    def heard(child: Child) -> list[Any]:
        messages = [child.hear()]
        while messages[-1]["kind"] != "end":
            messages.append(child.hear())
        return messages

    with children() as start:
        first = [start(carry, contract, str(gate)) for _ in range(3)]
        hear_until(first[0], lambda m: m["kind"] == "step" and m["step"] == 4)
        with Register.open(contract["register"]) as register:
            view = register.read()
        assert view is not None
        source = next(child for child in first if child.pid == view.members[0].peer.pid)
        joiner = start(carry, contract, str(gate), source.pid)
        os.waitpid(source.pid, 0)
        gate.touch()  # no process replaces it
        first.remove(source)
        source._gone = True
        ends, new = [heard(child)[-1] for child in first], heard(joiner)
        for child in (*first, joiner):
            child.end()
    whole = torch.arange(BLOCKS * BLOCK // 8).double().sum().item() + sum(range(LATE_STEPS))
    assert {end["sum"] for end in (*ends, new[-1])} == {whole}
    synced = [message for message in new if message["kind"] == "synced"]
    assert sum(event["bytes"] + event["kept"] for event in synced) == len(synced) * BLOCKS * BLOCK
    assert new[-1]["read"] <= BLOCKS + 4, "no block but those under way was read twice"


# -- leaving nothing behind


def test_a_session_that_cannot_start_leaves_nothing_behind(contract: dict[str, Any]) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ValueError, match="none of this machine"):
        Session(**contract, size=1, host="203.0.113.1")
    assert set(threading.enumerate()) <= threads
    with Register.open(contract["register"]) as register:
        assert register.read() is None
