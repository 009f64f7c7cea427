"""Evidence of failure -> membership -> rebuild -> resume.

with ft.Session(min_size=2) as session:
    for attempt in session.steps(total): ...
"""

from holdfast.ft.attempt import Attempt
from holdfast.ft.copies.sharded import Sharded
from holdfast.ft.error_history import StepFailed
from holdfast.ft.gradients import ShardSums
from holdfast.ft.joining import AlreadyJoined
from holdfast.ft.session import Session
from holdfast.ft.step_error import StepError
from holdfast.ft.timeouts import Timeouts
from holdfast.ft.transfer import StateNotGiven
from holdfast.ft.view import Job, Member, View

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
