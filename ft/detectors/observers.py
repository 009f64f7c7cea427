"""`observers`: heartbeats between hosts. Each member is watched by members of other hosts, and most of them must agree.

The membership chooses the processes that each process watches, and evicts a member that most observers suspect.

`SuspicionGraph` draws conclusions beyond what most observers of a member decide. Each suspicion is an edge between an
observer and a member that it does not hear or cannot reach. Sans-I/O: the caller passes the time, the statements of all
processes, and the processes that this one watches. There are four conclusions:

- This process is cut off if it hears less than half of the job. It stops at once, and leaves the next epoch to the
  others. A cut-off side cannot be told from a side that has lost all its peers, so if no new epoch begins for a while,
  this process proposes one itself, and the register decides. If it hears the others again before that, it resigns: it
  has stopped, they have not, and so it must be replaced. While the job is forming there is nothing to stop, and it
  stays.
- Another process has stopped if its suspicions show that it is cut off. It is unreachable before this process proposes.
- Some pairs may be unable to reach each other while most observers have no suspicion (a single link is cut). After a
  while the fewest members that are in all such pairs count as failed: those with the most suspicions, and of equals the
  last.
- If a transport has reported a peer, its communicator is over, so one member counts as failed sooner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.ft import events
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.heartbeat import SilenceEvent, SilenceTracker
from holdfast.ft.events import LostMajority, ResignedItself
from holdfast.ft.membership.events import Cleared, Stalled, Suspicion, Unreachable
from holdfast.ft.membership.view import Member, Timeouts, View

PATIENCE = 2.0
"""The number of suspect times for which a side that is cut off leaves the next epoch to the others."""
STALEMATE = 3.0
"""The number of suspect times for which pairs that do not hear each other may stay in one epoch."""


Conclusion = LostMajority | ResignedItself | Unreachable
"""This process must stop; it had stopped, and the others must go on without it; they must without another one."""


@dataclass(frozen=True, slots=True)
class _Edge:
    since: float
    evidence: str
    reported: bool  # by a transport: it does not heal in this epoch


class SuspicionGraph:
    """The suspicions that one process knows, and its conclusions. `in_doubt`: `look` should be called again soon."""

    def __init__(self, me: Member, timeouts: Timeouts) -> None:
        self._me, self._timeouts = me, timeouts
        self._view: View | None = None
        self._watched: frozenset[str] = frozenset()
        self._begin()

    def _begin(self) -> None:
        self._edges: dict[tuple[str, str], _Edge] = {}
        self._failed: set[str] = set()
        self._cut_off_since: float | None = None
        self._resigned = False

    @property
    def in_doubt(self) -> bool:
        return bool(self._edges) or self._cut_off_since is not None

    def follow(self, view: View | None, watched: Iterable[Member]) -> None:
        """Evaluate the members of `view` from now on; this process watches `watched`."""
        if view is None or self._view is None or view.epoch != self._view.epoch:
            self._begin()
        self._view = view
        here = self._me.peer.host
        ranks = view.ranks if view is not None else {}
        self._watched = frozenset(m.id for m in watched if m.peer.host != here and m.id in ranks)

    def suspect(self, observer: str, member: str, evidence: str, now: float) -> None:
        """`observer` does not hear `member`."""
        self._complain(observer, member, _Edge(now, evidence, False))

    def report(self, observer: str, member: str, evidence: str, now: float) -> None:
        """A transport of `observer` reports that `member` failed: its communicator is over, whatever follows."""
        self._complain(observer, member, _Edge(now, evidence, True))

    def clear(self, observer: str, member: str) -> None:
        """`observer` hears `member` again."""
        edge = self._edges.get((observer, member))
        if edge is not None and not edge.reported:
            del self._edges[observer, member]

    def _complain(self, observer: str, member: str, edge: _Edge) -> None:
        view = self._view
        if view is None or observer == member or view.rank_of(observer) is None or view.rank_of(member) is None:
            return
        known = self._edges.get((observer, member))
        if known is None or (edge.reported and not known.reported):
            self._edges[observer, member] = edge

    def look(self, now: float) -> tuple[Conclusion, ...]:
        """The conclusions so far. Call it a few times a heartbeat while `in_doubt`."""
        view = self._view
        if view is None or view.rank_of(self._me.id) is None or self._resigned:
            return ()
        silent = sorted(m for m in self._watched if (edge := self._edges.get((self._me.id, m))) and not edge.reported)
        if self._cut_off_since is not None:
            return self._while_cut_off(silent, now)
        if silent and self._in_minority(view, silent):
            self._cut_off_since = now
            words = f"cut off: {len(silent)} of the {len(self._watched)} members watched elsewhere are silent"
            return (LostMajority(evidence=words),)
        return self._stalemate(view, now)

    def _in_minority(self, view: View, silent: list[str]) -> bool:
        """Whether this process's side is less than half of the job, judged by the members that it watches."""
        return _outweighed(view, len(view.hosts[self._me.peer.host]) + len(self._watched), silent)

    def _stopped(self, view: View) -> set[str]:
        """The members that are cut off, as their own suspicions show, and so must have stopped."""
        silent: dict[str, list[str]] = {}
        for (observer, member), edge in self._edges.items():
            if not edge.reported:
                silent.setdefault(observer, []).append(member)
        return {observer for observer, members in silent.items() if _outweighed(view, len(view.members), members)}

    def _while_cut_off(self, silent: list[str], now: float) -> tuple[Conclusion, ...]:
        view, since = self._view, self._cut_off_since
        assert view is not None and since is not None
        if not silent or not self._in_minority(view, silent):
            if view.phase == "forming":
                self._cut_off_since = None
                return ()
            self._resigned = True
            return (ResignedItself(evidence=f"it was cut off for {now - since:.2f} s and had stopped"),)
        if now - since < PATIENCE * self._timeouts.suspect:
            return ()
        new = [member for member in silent if member not in self._failed]
        self._failed.update(new)
        words = f"silent like most others, and nobody has taken over for {now - since:.2f} s"
        return tuple(Unreachable(member, words) for member in new)

    def _stalemate(self, view: View, now: float) -> tuple[Conclusion, ...]:
        suspect, stopped = self._timeouts.suspect, self._stopped(view)
        if not any(
            now - edge.since >= (1.0 if edge.reported or observer in stopped else STALEMATE) * suspect
            for (observer, _), edge in self._edges.items()
        ):
            return ()
        conclusions = []
        for member in self._cover(view, now):
            if member != self._me.id and member not in self._failed:
                self._failed.add(member)
                conclusions.append(Unreachable(member, self._words(member)))
        return tuple(conclusions)

    def _cover(self, view: View, now: float) -> list[str]:
        """Members that together are in every pair, chosen greedily.

        Those that have stopped are first, then the member in the most pairs, and so on. Of equals, the one that more
        members suspect is first, and then the one of the highest rank.
        """
        edges = [pair for pair, edge in self._edges.items() if now - edge.since >= self._timeouts.heartbeat]
        chosen: list[str] = []
        stopped = self._stopped(view)
        while edges:
            pairs: dict[str, set[str]] = {}
            complaints: dict[str, int] = {}
            for observer, member in edges:
                pairs.setdefault(observer, set()).add(member)
                pairs.setdefault(member, set()).add(observer)
                complaints[member] = complaints.get(member, 0) + 1
            worst = max(pairs, key=lambda w: (w in stopped, len(pairs[w]), complaints.get(w, 0), view.ranks[w]))
            chosen.append(worst)
            edges = [pair for pair in edges if worst not in pair]
        return chosen

    def _words(self, member: str) -> str:
        complaints = {observer: edge for (observer, whom), edge in self._edges.items() if whom == member}
        if not complaints:
            return "it complains of others that nobody else complains of"
        first = complaints[min(complaints)]
        return f"{len(complaints)} of the others cannot work with it: {first.evidence}"


def _outweighed(view: View, seen: int, silent: list[str]) -> bool:
    """Whether the `silent` are most of the `seen` members of `view`, or half of them including the first member."""
    heard = seen - len(silent)
    if 2 * heard != seen:
        return 2 * heard < seen
    return view.members[0].id in silent


NOT_LISTENING = "its host says that nobody listens at its address any more"


class ObserversDetector(Detector):
    """Suspects silent members of other hosts; detects that this process is cut off, and which members break
    connectivity.
    """

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._silence = SilenceTracker(context.me, context.timeouts, lambda pid: False)
        self._observers = SuspicionGraph(context.me, context.timeouts)
        self._view: View | None = None
        self._watched: tuple[Member, ...] = ()
        self._not_listening: set[str] = set()

    @property
    def missed(self) -> int:
        return self._silence.missed

    def silent_for(self, member_id: str, now: float) -> float | None:
        return self._silence.silent_for(member_id, now)

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        here = self.context.me.peer.host
        self._silence.follow([m for m in watched if m.peer.host != here], self.context.loop.time())
        self._observers.follow(view, watched)
        self._view, self._watched = view, watched
        self._not_listening &= {member.id for member in watched}

    def heard(self, member_id: str, now: float) -> None:
        self._not_listening.discard(member_id)
        for finding in self._silence.hear(member_id, now):
            if isinstance(finding, Cleared):
                self._observers.clear(self.context.me.id, member_id)
                self.context.note(events.SuspicionCleared(member=member_id))
                self.context.tell(finding)

    def reported(self, observer: str, member: str, evidence: str | None, now: float) -> None:
        if evidence is None:
            self._observers.clear(observer, member)
        else:
            self._observers.suspect(observer, member, evidence, now)

    def suspected(self, observer: str, member: str, evidence: str, now: float) -> None:
        self._observers.report(observer, member, evidence, now)

    def refused(self, member_id: str, now: float) -> None:
        self._not_listening.add(member_id)
        self._suspect(self._silence.doubt(member_id, NOT_LISTENING), now)

    def _suspect(self, findings: Iterable[SilenceEvent], now: float) -> None:
        for seen in findings:
            if isinstance(seen, Suspicion):
                self._observers.suspect(self.context.me.id, seen.member, seen.evidence, now)
                self.context.note(events.MemberSuspected(member=seen.member, evidence=seen.evidence))
                self.context.tell(seen)

    def look(self, now: float) -> None:
        self._suspect(self._silence.look(now), now)
        for finding in self._observers.look(now):
            match finding:
                case events.LostMajority():
                    self.context.note(finding)
                    self.context.stop(finding.evidence)
                case events.ResignedItself():
                    self.context.note(finding)
                    self.context.resign(finding.evidence)
                case Unreachable(member, evidence):
                    self.context.note(events.MemberUnreachable(member=member, evidence=evidence))
                    self._remove(finding)
        self.doubtful = self._silence.any_silent or self._observers.in_doubt

    def _remove(self, finding: Unreachable) -> None:
        """End a member of this host for certain; go on without one of another host.

        So is it with a member of this host that no longer listens, as this process has seen: it has left, and may join
        again before this process learns that both were evicted.
        """
        member = finding.member
        if self._host_of(member) == self.context.me.peer.host and member not in self._not_listening:
            self.context.tell(Stalled(member, finding.evidence))
        else:
            self.context.tell(finding)

    def _host_of(self, member: str) -> str | None:
        rank = self._view.rank_of(member) if self._view is not None else None
        if self._view is not None and rank is not None:
            return self._view.members[rank].peer.host
        return next((m.peer.host for m in self._watched if m.id == member), None)
