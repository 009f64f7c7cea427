"""Injected cases: real processes under `ft.Session`, one of which is killed, stopped, slow, cut off or wrong.

A message lost on a link goes out over ucx under a tag that no rank receives: the sender believes that it has sent.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

from holdfast.comms.execution.argument_checks import TAGS
from holdfast.ft.diagnosis.analyse import analyse
from holdfast.ft.diagnosis.evidence import Finding, JobEvidence, gather
from holdfast.harness.cluster.job import Job
from holdfast.harness.cluster.local_cluster import LocalCluster
from support.blame.cases import ScoredCase, Truth

if TYPE_CHECKING:
    from holdfast.ft import Session

_ENVIRON = {"HOLDFAST_CHECK": "0", "UCX_TLS": "tcp,self"}
_ASTRAY = TAGS - 1
"""A tag that a user could receive from, and that this job does not use."""
LIMIT = 20.0
"""Seconds within which a fault must show."""


def train(session: Session, fault: str, victim: int, other: int, at: int, steps: int) -> None:
    """Steps of a few small ops; what is wrong with rank `victim` begins at step `at`."""
    import torch

    began = session.step
    for attempt in session.steps(steps):
        first_epoch = began == 0 and attempt.comm.size > victim
        mine = first_epoch and attempt.rank == victim and attempt.step >= at
        with attempt:
            comm = attempt.comm
            before = fault == "slow" or attempt.step <= at
            time.sleep(0.002 if before else 0.05)  # later ops would overwrite the recording of the fault
            if mine and attempt.step == at:
                _break(fault, comm, other)
            if mine and fault == "slow":
                time.sleep(0.004)
            shape = [3, 2] if mine and fault == "shape" and attempt.step == at else [2, 3]
            comm.all_reduce(torch.ones(shape))
            if not (mine and fault == "order" and attempt.step == at):
                comm.broadcast(torch.ones(4), src=0)
            comm.all_gather_single(torch.ones(2 * comm.size), torch.ones(2))


def _break(fault: str, comm: Any, other: int) -> None:
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(LIMIT)
        case "cut":
            _cut(comm, other)


def _cut(comm: Any, other: int) -> None:
    """Lose what this rank sends to `other` from now on: it goes out under tags that `other` does not receive."""
    transport = comm._transport
    send = transport._post_send

    def post(tensor: Any, dst: int, tag: int) -> Any:
        return send(tensor, dst, _ASTRAY if dst == other else tag)

    transport._post_send = post


FAULTS = {
    "kill": "crash",
    "stop": "hang",
    "sleep": "hang",
    "slow": "slow",
    "cut": "cut",
    "shape": "mismatch",
    "order": "mismatch",
}
"""The faults, and the kind that blame must report for each."""


def injected(fault: str, seed: int) -> ScoredCase:
    """Run a job with the fault, ask blame, and compare."""
    rng = random.Random(f"{fault}/{seed}")
    size = rng.choice([2, 3] if fault == "cut" else [2, 3, 4])  # of 4, not every pair exchanges messages
    victim = rng.randrange(size)
    other = rng.choice([r for r in range(size) if r != victim])
    backend = "ucx" if fault == "cut" else "shm"
    kind = FAULTS[fault]
    truth = Truth(kind, victim, other if fault == "cut" else None)
    steps = 60 if fault == "slow" else 10_000
    options = {"min_size": 1}
    with (
        LocalCluster(size, backend, session=options, environ=_ENVIRON, threads=1, echo=False) as cluster,
        cluster.start(train, fault, victim, other, rng.randint(3, 8), steps) as job,
    ):
        found = _await(job, kind)
    return ScoredCase(f"{fault} {seed}", truth, found[0] if found else None)


def _await(job: Job, kind: str) -> list[Finding]:
    """Wait until blame has something to find, and return that; let a slow job run to its end."""
    deadline = time.monotonic() + LIMIT
    if kind == "slow":
        job.results(LIMIT)
    while True:
        time.sleep(0.3)
        found = analyse(_look(job))
        sure = [finding for finding in found if finding.kind != "slow" or kind == "slow"]
        if (sure and sure[0].kind != "stuck") or time.monotonic() >= deadline:
            return found


def _look(job: Job) -> JobEvidence:
    return gather(job.directory / "events", time.monotonic())
