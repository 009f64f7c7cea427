"""The end of a session: each of its parts is closed, whatever another part raises."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast import ft
from holdfast.comms.system.keys import create_key
from holdfast.ft import settings
from holdfast.ft.communicators import CommunicatorManager
from holdfast.ft.node.register import Register
from holdfast.ft.node.runtime import Runtime
from holdfast.ft.state.replicator import StateReplicator
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.telemetry import Telemetry
from holdfast.ft.termination import TerminationRequest
from holdfast.ft.torch_default_group import DefaultGroup


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    key = tmp_path / "job.key"
    create_key(key)
    return {"size": 1, "job": "closing", "register": f"sqlite://{tmp_path}/job.sqlite", "key_file": key}


CLOSES = [
    (ft.Session, "_ends_job"),
    (DefaultGroup, "drop"),
    (StateReplicator, "close"),
    (CommunicatorManager, "close"),
    (Runtime, "close"),
    (Register, "close"),
    (Telemetry, "close"),
    (EventLog, "close"),
    (TerminationRequest, "end"),
]


def _open_here() -> tuple[set[threading.Thread], int]:
    """The threads of holdfast in this process, and the number of its descriptors."""
    ours = {thread for thread in threading.enumerate() if thread.name.startswith("holdfast")}
    return ours, len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("owner, name", CLOSES, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_a_part_that_cannot_be_closed_keeps_no_other_open(
    owner: type, name: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: set[tuple[type, str]] = set()

    def record(part: type, method: str) -> None:
        close = getattr(part, method)

        def recorded(self: object, *given: object) -> object:
            closed.add((part, method))
            done = close(self, *given)
            if (part, method) == (owner, name) and before is not None:
                raise OSError("it cannot be closed")
            return done

        monkeypatch.setattr(part, method, recorded)

    before = None
    for part, method in CLOSES:
        record(part, method)
    session, before = ft.Session(**arguments), _open_here()
    closed.clear()
    with pytest.raises(OSError, match="it cannot be closed"), session:
        next(session.steps(2))  # it leaves before the last step
    assert closed == set(CLOSES)
    assert _open_here() == before
    settings.check_single(session._settings)  # the next session of the job may open


def test_a_session_that_cannot_begin_leaves_nothing_open(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, before = ft.Session(**arguments), _open_here()

    def refuse(*given: object) -> None:
        raise OSError("no thread can be started")

    monkeypatch.setattr(Runtime, "__init__", refuse)
    with pytest.raises(OSError, match="no thread"), session:
        pass
    assert _open_here() == before
    settings.check_single(session._settings)
