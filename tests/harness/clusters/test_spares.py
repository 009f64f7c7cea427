"""Who stands by, from the events of a job: what must be so before a rank is killed that a spare shall replace."""

from __future__ import annotations

from holdfast.ft.telemetry.event import Event
from holdfast.harness.cluster.spares import standing_by

TOLD = Event(1.0, "spare", 3, "spare", {"epoch": 2, "to": ["first", "second"]})


def welcomed(by: str) -> Event:
    return Event(2.0, by, 1, "welcomed", {"spare": "spare"})


def test_a_spare_stands_by_once_all_whom_it_told_have_heard() -> None:
    assert standing_by([]) == set()
    assert standing_by([TOLD]) == set()
    assert standing_by([TOLD, welcomed("first")]) == set()
    assert standing_by([TOLD, welcomed("first"), welcomed("first")]) == set()
    assert standing_by([welcomed("second"), TOLD, welcomed("first")]) == {"spare"}
