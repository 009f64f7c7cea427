"""A rank dies between dispatch and combine: the living commit the step in its epoch, go on, and rebuild when asked."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from holdfast import ft
from holdfast.comms.errors import Revoked
from holdfast.comms.experts import Switch
from holdfast.ft import Session
from holdfast.harness import LocalCluster
from support.samples.tally import Tally, contract_in, start_with_spares
from support.waiting import PATIENCE, eventually

STEPS, KILL_STEP, REBUILD_STEP, VICTIM = 8, 2, 5, 1


@dataclass(frozen=True)
class Seen:
    """One attempt, as a rank has seen it."""

    step: int
    epoch: int
    committed: bool
    before: tuple[bool, ...]
    """`Attempt.alive`."""
    after: tuple[bool, ...]
    """`Switch.alive`."""


def exchange(switch: Switch, dies: bool = False) -> None:
    rows = switch.dispatch(torch.ones(6, 4), torch.arange(6).view(6, 1), torch.ones(6, 1))
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    combined = switch.combine(rows.tokens)
    living = torch.tensor([switch.alive[expert * switch.size // 6] for expert in range(6)])
    assert torch.equal(combined, torch.ones(6, 4) * living[:, None])


def train(session: Session, gate: str = "", *, barrier: bool = False) -> tuple[list[Seen], list[int]]:
    """Run the steps, in which a rank dies; not before `gate` is there. A `barrier` in the next step needs the dead."""
    counter, seen = Tally(), []
    session.attach("counter", counter)
    switch: Switch | None = None
    for attempt in session.steps(STEPS):
        with attempt:
            if switch is None or switch.epoch != attempt.epoch:
                switch = Switch(attempt.lasting, 6, top_k=1, hidden=4, max_tokens=6)
            if gate and attempt.step == KILL_STEP:
                eventually(Path(gate).exists)
            dies = (attempt.step, attempt.rank, attempt.comm.size) == (KILL_STEP, VICTIM, 3)
            exchange(switch, dies)
            if barrier and attempt.degraded:
                with pytest.raises(Revoked):
                    attempt.comm.barrier()
            if barrier and attempt.step == KILL_STEP + 1:
                attempt.comm.barrier()
        assert switch is not None
        if attempt.committed:
            counter.steps.append(attempt.step)
        seen.append(Seen(attempt.step, attempt.epoch, attempt.committed, attempt.alive, switch.alive))
        if attempt.step == REBUILD_STEP:
            session.rebuild()
    return seen, counter.steps


ALL, MASKED = (True, True, True), (True, False, True)


def test_the_living_commit_in_the_same_epoch_go_on_and_rebuild_when_asked() -> None:
    with LocalCluster(3, "shm", session={"on_death": "go_on"}) as cluster:
        outcomes = cluster.start(train).results(timeout=PATIENCE)
    assert len(outcomes) == 2
    for seen, steps in outcomes:
        assert steps == list(range(STEPS)), "no step is lost"
        assert [each.step for each in seen if each.committed] == [each.step for each in seen], "nor done twice"
        first = seen[0].epoch
        assert [each.epoch == first for each in seen] == [step <= REBUILD_STEP for step in range(STEPS)]
        assert [each.before for each in seen] == [ALL] * 3 + [MASKED] * 3 + [(True, True)] * 2
        assert [each.after for each in seen] == [ALL] * 2 + [MASKED] * 4 + [(True, True)] * 2


def test_the_step_is_finished_and_then_a_spare_takes_the_place() -> None:
    with LocalCluster(3, "shm", spares=1, session={"on_death": "finish_step"}) as cluster:
        outcomes = start_with_spares(cluster, train).results(timeout=PATIENCE)
    assert [steps for _, steps in outcomes] == [list(range(STEPS))] * 3, "the spare has the state of all steps"
    for seen, _ in outcomes:
        assert all(each.committed and each.before == ALL for each in seen)
    longest = max((seen for seen, _ in outcomes), key=len)
    assert [each.after for each in longest] == [MASKED if step == KILL_STEP else ALL for step in range(STEPS)]


def test_an_op_that_needs_the_dead_ends_the_degraded_epoch_and_harms_nobody() -> None:
    def body(session: Session) -> list[tuple[int, bool, int]]:
        seen, steps = train(session, barrier=True)
        assert steps == list(range(STEPS))
        return [(each.step, each.committed, len(each.before)) for each in seen[: KILL_STEP + 4]]

    with LocalCluster(3, "shm", session={"on_death": "go_on"}) as cluster:
        for seen in cluster.start(body).results(timeout=PATIENCE):
            assert seen == [(0, True, 3), (1, True, 3), (2, True, 3), (3, False, 3), (3, True, 2), (4, True, 2)]


def test_a_degraded_epoch_ends_where_a_checkpoint_is_due(tmp_path: Path) -> None:
    """The rank dies in step 2; the checkpoints after 4 steps and after the last one are written by all that live."""

    def body(session: Session) -> list[int]:
        session.checkpoints(tmp_path, every=4, last=STEPS)
        return [each.epoch for each in train(session)[0]]

    with LocalCluster(3, "shm", session={"on_death": "go_on"}) as cluster:
        outcomes = cluster.start(body).results(timeout=PATIENCE)
    assert len(outcomes) == 2
    for epochs in outcomes:
        first = epochs[0]
        assert [epoch == first for epoch in epochs] == [step < 4 for step in range(STEPS)]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000000004", f"step-{STEPS:09d}"]


def test_what_a_degraded_epoch_cannot_keep_is_refused_before_anything_begins(tmp_path: Path) -> None:
    session = ft.Session(**contract_in(tmp_path, size=1, on_death="finish_step"))
    with pytest.raises(ValueError, match=r"on_death='finish_step' with attach_sharded\(\).* use on_death=\"rebuild\""):
        session.attach_sharded(lambda mesh: {})
    with pytest.raises(ValueError, match="'mourn' is none of 'rebuild', 'finish_step', 'go_on'"):
        ft.Session(size=1, on_death="mourn")  # type: ignore[arg-type]
