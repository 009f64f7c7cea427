"""Fault-tolerant jobs: from evidence of a failure to the next view, a new communicator, and the next step.

with ft.Session(min_size=2) as session:
    for attempt in session.steps(total): ...
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.ft.membership.view import Job, Member, StepError, StepFailed, Timeouts, View
    from holdfast.ft.session import Attempt, Session
    from holdfast.ft.settings import AlreadyJoined
    from holdfast.ft.state.gradients import ShardSums
    from holdfast.ft.state.replicator import Sharded
    from holdfast.ft.state.transfer import StateNotGiven

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


def on_demand(homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that has its public names in the modules `homes` (name -> module).

    They are imported at first use: the `holdfast` command must not wait for torch.

    An AttributeError from within such a module becomes an ImportError, with it as the cause: `from PACKAGE import NAME`
    reports any AttributeError as "cannot import name", without its cause.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"no public name {name!r}: there are {', '.join(homes)}")
        try:
            module = importlib.import_module(homes[name])
        except AttributeError as error:
            raise ImportError(f"{homes[name]} cannot be imported: AttributeError: {error}") from error
        return getattr(module, name)

    return get


__getattr__ = on_demand(
    {
        "AlreadyJoined": "holdfast.ft.settings",
        "Attempt": "holdfast.ft.session",
        "Job": "holdfast.ft.membership.view",
        "Member": "holdfast.ft.membership.view",
        "Session": "holdfast.ft.session",
        "ShardSums": "holdfast.ft.state.gradients",
        "Sharded": "holdfast.ft.state.replicator",
        "StateNotGiven": "holdfast.ft.state.transfer",
        "StepError": "holdfast.ft.membership.view",
        "StepFailed": "holdfast.ft.membership.view",
        "Timeouts": "holdfast.ft.membership.view",
        "View": "holdfast.ft.membership.view",
    }
)
