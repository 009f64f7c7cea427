"""Known bugs of failure handling, ours and other projects', which can be injected into the running code.

Checkers that find none of them prove nothing. `reproduce.reproduce` looks for the first seed that shows a bug.
"""

from __future__ import annotations

from holdfast.harness.simulate.known_bugs import commit_bugs, evidence_bugs, membership_bugs, node_bugs
from holdfast.harness.simulate.known_bugs.known_bug import KnownBug

KNOWN_BUGS = tuple(
    bug
    for module in (membership_bugs, evidence_bugs, commit_bugs, node_bugs)
    for bug in vars(module).values()
    if isinstance(bug, KnownBug)
)

__all__ = ["KNOWN_BUGS", "KnownBug"]
