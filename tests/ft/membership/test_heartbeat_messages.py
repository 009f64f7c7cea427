"""Processes of one host read each other's heartbeats in shared memory, and send messages for changes and in doubt."""

from __future__ import annotations

import time

import torch

from holdfast.ft import Session, Timeouts
from holdfast.ft.node.connections import MemberConnections
from holdfast.ft.node.node import CALM_BEATS, CALM_BEATS_A_MESSAGE
from holdfast.harness import LocalCluster

BEAT = 0.05
FAST = Timeouts(heartbeat=BEAT)
COUNTED = 8 * CALM_BEATS_A_MESSAGE
"""The number of heartbeats in which messages are counted, once the view is calm."""


def work(session: Session) -> tuple[int, int]:
    """The messages to the other rank in the first heartbeats of a view, and in as many later ones."""
    sent: list[float] = []
    notify = MemberConnections.notify

    def noted(self: MemberConnections, member_id: str, method: str, body: bytes) -> None:
        if method == "beat":
            sent.append(time.monotonic())
        notify(self, member_id, method, body)

    MemberConnections.notify = noted  # type: ignore[method-assign]
    begun, ends = 0.0, [False]
    for attempt in session.steps(10_000):
        with attempt:
            begun = begun or time.monotonic()
            late = time.monotonic() - begun > (2 * CALM_BEATS + COUNTED) * BEAT
            flag = torch.tensor([float(late)])
            attempt.comm.all_reduce(flag)
            ends[0] = bool(flag)
        time.sleep(0.01)
        if ends[0]:
            break
    calm = begun + 2 * CALM_BEATS * BEAT
    early = sum(begun < each < begun + CALM_BEATS / 2 * BEAT for each in sent)
    return early, sum(calm < each < calm + COUNTED * BEAT for each in sent)


def test_in_a_calm_epoch_a_mate_gets_one_message_in_five_heartbeats() -> None:
    with LocalCluster(2, "shm", session={"timeouts": FAST}) as cluster:
        found = cluster.start(work).results()
    print(f"\nmessages early and late: {found}")
    for early, late in found:
        assert early >= CALM_BEATS / 4, "after a change of the view a message goes with each heartbeat"
        assert 2 <= late < COUNTED / 2
