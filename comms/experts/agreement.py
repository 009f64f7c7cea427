"""`MaskAgreement`: the living of a step agree on the ranks whose results none of them uses. Pure: no I/O, no clock.

**The problem.** Rank x dies while it sends its results: rank 0 has them, rank 1 does not. All that live on must leave x
out, or none may; and more ranks may die while they agree.

**The model.** Links between living ranks lose nothing and keep the order of messages. A message of a rank that dies may
be lost or not. A rank that is reported gone never takes part again (its process has ended, it has left, or it is
fenced), and each such rank is reported in the end.

**The protocol.** When a rank has all the results that will come, it reports to all others the ranks that it lost.

1. It waits for the report of each participant, or until that one is gone. If all have reported, and none lost a rank,
   it decides "nobody", sends that decision to all, and returns. This is every step without a death: no further wait.
2. Else it proposes the union of the reports that it heard. It waits, for each participant of a lower rank in turn,
   until it has that one's decision, which replaces its proposal, or that one is gone. Then it decides on its proposal,
   and sends the decision to all.

**Why the living decide alike.** Suppose that a rank decided in (1). Then each report of the step is empty, whoever
sent it and to whom, so each proposal is, and each decision. Else all living ranks decide in (2). Let r be the lowest of
them. Each other one waits for r's decision, because r is never gone, and proposes it from then on. It can replace that
proposal only by the decision of a rank between r and itself, which, having waited for r, too, is the same one.

**Why a decision fits each living rank.** A rank that proposes has waited for the reports of all the living, so that its
proposal names all that one of them has lost; and a decision is some rank's proposal. A rank that dies after its results
arrived everywhere is not named: the step uses them.

A decision of a rank that dies may differ from that of the living: it has returned nothing that outlives it. A living
rank that is named (its peers refused what it sent) learns so from its own decision, and leaves.
"""

from __future__ import annotations

from collections.abc import Iterable

REPORT, DECISION = "report", "decision"

_NOBODY: frozenset[int] = frozenset()


class MaskAgreement:
    """One rank's part in one step's agreement: the caller sends `lost`, then hears what `awaited` names, in a loop.

    `decision` is None until `awaited` is; the caller then sends it to the other participants.
    """

    def __init__(self, rank: int, participants: Iterable[int], lost: Iterable[int]) -> None:
        self._rank, self._participants = rank, sorted(participants)
        self.lost = frozenset(lost)
        self._proposal, self._complete = self.lost, not self.lost
        self._unheard = [(other, REPORT) for other in self._participants if other != rank]
        self._decides_alone = False
        self.decision: frozenset[int] | None = None
        self._proceed()

    @property
    def awaited(self) -> tuple[int, str] | None:
        """The rank and the kind of the message to hear next; None once this rank has decided."""
        return self._unheard[0] if self._unheard else None

    def hear(self, named: Iterable[int] | None) -> None:
        """Take the message that `awaited` names: the ranks in it, or None if its sender is gone without it."""
        _, kind = self._unheard.pop(0)
        if kind == DECISION:
            if named is not None:
                self._proposal = frozenset(named)
        elif named is None:
            self._complete = False
        else:
            self._proposal |= frozenset(named)
            self._complete = self._complete and not self._proposal
        self._proceed()

    def _proceed(self) -> None:
        if self._unheard:
            return
        if not self._complete and not self._decides_alone:
            self._decides_alone = True
            self._unheard = [(other, DECISION) for other in self._participants if other < self._rank]
        if not self._unheard:
            self.decision = _NOBODY if self._complete else self._proposal
