"""The living of a step agree on whom they mask, whatever dies, whenever, and whatever its messages still reach."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from random import Random

from holdfast.comms.experts import DECISION, REPORT, MaskAgreement

RESULTS = "results"
Message = tuple[str, frozenset[int]]
Wait = tuple[int, str]


class HasteAgreement(MaskAgreement):
    """A protocol that is wrong: it decides once it has all reports, and hears no decision."""

    def _proceed(self) -> None:
        if not self._unheard:
            self.decision = self._proposal


class Step:
    """One step of some ranks: each sends its results, and agrees. `random` chooses who acts, dies and is found dead."""

    def __init__(self, random: Random, size: int, deaths: int, protocol: type[MaskAgreement] = MaskAgreement) -> None:
        self.random, self.ranks, self.protocol = random, range(size), protocol
        self.links: dict[tuple[int, int], deque[Message]] = {(a, b): deque() for a in self.ranks for b in self.ranks}
        self.lost: dict[int, set[int]] = {rank: set() for rank in self.ranks}
        self.decided: dict[int, frozenset[int]] = {}
        self.dead: set[int] = set()
        self.fenced: set[int] = set()
        self.found_dead: set[tuple[int, int]] = set()
        programs = {rank: self.program(rank) for rank in self.ranks}
        waits = {rank: next(program) for rank, program in programs.items()}
        while unfinished := self.unfinished():
            if len(self.dead) < deaths and random.random() < 0.1:
                victim = random.choice([rank for rank in self.ranks if rank not in self.dead])
                if random.random() < 0.3 and victim not in self.decided:
                    self.fenced.add(victim)  # it was silent: it goes on, but may not decide, and is not heard any more
                self.dead.add(victim)
                continue
            rank = random.choice(unfinished + [rank for rank in self.fenced if rank in waits])
            wait, answer = waits[rank], None
            if wait is not None:
                answer = self.hear(rank, wait)
                if answer == "later":
                    continue
            try:
                waits[rank] = programs[rank].send(answer)
            except StopIteration:
                assert rank in self.decided
                del waits[rank]

    def unfinished(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.dead and rank not in self.decided]

    def program(self, rank: int) -> Generator[Wait | None, Message | None, None]:
        """What a rank does: it yields what it waits for, and None after each message sent. It may die there."""
        others = [other for other in self.ranks if other != rank]
        yield None
        for other in self.random.sample(others, len(others)):
            self.links[rank, other].append((RESULTS, frozenset()))
            yield None
        for other in others:
            if (yield other, RESULTS) is None:
                self.lost[rank].add(other)
        agreement = self.protocol(rank, self.ranks, self.lost[rank])
        for other in self.random.sample(others, len(others)):
            self.links[rank, other].append((REPORT, agreement.lost))
            yield None
        while agreement.awaited is not None:
            message = yield agreement.awaited
            agreement.hear(None if message is None else message[1])
        assert agreement.decision is not None
        for other in self.random.sample(others, len(others)):
            self.links[rank, other].append((DECISION, agreement.decision))
            yield None
        self.decided[rank] = agreement.decision

    def hear(self, rank: int, wait: Wait) -> Message | str | None:
        """The message, None if its sender is found dead, or "later"."""
        other, kind = wait
        link = self.links[other, rank]
        if other in self.fenced and (other, rank) in self.found_dead:
            return None
        if link and self.random.random() < 0.7:
            message = link.popleft()
            assert message[0] == kind
            return message
        if other in self.dead and (other, rank) not in self.found_dead and self.random.random() < 0.5:
            self.found_dead.add((other, rank))
            if other in self.fenced:
                return None
            for _ in range(self.random.randint(0, len(link))):  # the end of what it sent is lost with it
                link.pop()
        return None if (other, rank) in self.found_dead and not link else "later"


def faults(step: Step) -> list[str]:
    """What the step has done wrong."""
    living = [rank for rank in step.ranks if rank not in step.dead]
    decisions = {step.decided[rank] for rank in living}
    found = []
    if len(decisions) > 1:
        found.append(f"the living disagree: {step.decided}")
    for decision in decisions:
        if decision & set(living):
            found.append(f"{decision} names a living rank")
        if not decision >= set().union(*(step.lost[rank] for rank in living)):
            found.append(f"{decision} lacks a rank that a living one has lost")
    return found


def test_the_living_agree() -> None:
    for seed in range(6000):
        size = 1 + seed % 5
        step = Step(Random(seed), size, min(seed // 5 % 5, size - 1))
        assert not faults(step), seed
        assert step.dead or set(step.decided.values()) == {frozenset()}, seed


def test_the_model_finds_the_fault_of_a_protocol_of_one_round() -> None:
    assert any(faults(Step(Random(seed), 4, 3, HasteAgreement)) for seed in range(3000))


def test_without_a_death_a_rank_decides_once_it_has_heard_all_reports() -> None:
    agreement = MaskAgreement(1, range(3), ())
    agreement.hear(())
    assert agreement.decision is None
    agreement.hear(())
    assert agreement.decision == frozenset()


def test_a_rank_that_its_peers_refuse_learns_so() -> None:
    agreement = MaskAgreement(0, range(3), ())
    agreement.hear({0})
    agreement.hear({0})
    assert agreement.decision == {0}
