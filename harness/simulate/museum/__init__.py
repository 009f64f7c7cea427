"""Known bugs of failure handling, ours and others', to be put back into the running code.

A checker that finds none of them proves nothing. `tour.visit` looks for the first seed that shows a bug.
"""

from __future__ import annotations

from holdfast.harness.simulate.museum import commit_bugs, evidence_bugs, membership_bugs
from holdfast.harness.simulate.museum.exhibit import Exhibit

EXHIBITS: tuple[Exhibit, ...] = (*membership_bugs.EXHIBITS, *evidence_bugs.EXHIBITS, *commit_bugs.EXHIBITS)

__all__ = ["EXHIBITS", "Exhibit"]
