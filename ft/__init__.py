"""Fault-tolerant jobs: from evidence of a failure to the next view, a new communicator, and the next step.

with ft.Session(min_size=2) as session:
    for attempt in session.steps(total): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.ft.on_demand import on_demand

if TYPE_CHECKING:
    from holdfast.ft.attempt import Attempt
    from holdfast.ft.error_history import StepFailed
    from holdfast.ft.membership.view import Job, Member, StepError, View
    from holdfast.ft.session import Session
    from holdfast.ft.settings import AlreadyJoined
    from holdfast.ft.state.gradients import ShardSums
    from holdfast.ft.state.sharded import Sharded
    from holdfast.ft.state.transfer import StateNotGiven
    from holdfast.ft.timeouts import Timeouts

__all__ = [
    "AlreadyJoined",
    "Attempt",
    "Job",
    "Member",
    "Session",
    "ShardSums",
    "Sharded",
    "StateNotGiven",
    "StepError",
    "StepFailed",
    "Timeouts",
    "View",
]

__getattr__ = on_demand(
    {
        "AlreadyJoined": "holdfast.ft.settings",
        "Attempt": "holdfast.ft.attempt",
        "Job": "holdfast.ft.membership.view",
        "Member": "holdfast.ft.membership.view",
        "Session": "holdfast.ft.session",
        "ShardSums": "holdfast.ft.state.gradients",
        "Sharded": "holdfast.ft.state.sharded",
        "StateNotGiven": "holdfast.ft.state.transfer",
        "StepError": "holdfast.ft.membership.view",
        "StepFailed": "holdfast.ft.error_history",
        "Timeouts": "holdfast.ft.timeouts",
        "View": "holdfast.ft.membership.view",
    }
)
