"""Scores blame: the share of cases in which the right rank comes first, by kind of fault."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec

from holdfast.harness.blame.score.cases import KINDS, ScoredCase, generated
from holdfast.harness.blame.score.injected import all_injected

GOAL = 0.99


class KindScore(msgspec.Struct, frozen=True):
    """The cases of one kind: how many, how many right, and the errors in the others."""

    where: str
    kind: str
    cases: int
    right: int
    wrong: tuple[str, ...]


class BlameScore(msgspec.Struct, frozen=True):
    """All cases."""

    kinds: tuple[KindScore, ...]
    cases: int
    right: int
    share: float

    @property
    def passed(self) -> bool:
        return self.share >= GOAL

    def table(self) -> str:
        lines = [f"{kind.where:10} {kind.kind:10} {kind.right:5} of {kind.cases}" for kind in self.kinds]
        lines += [f"  wrong: {words}" for kind in self.kinds for words in kind.wrong[:5]]
        lines.append(f"right rank first: {self.right} of {self.cases}, {self.share:.2%} (to reach: {GOAL:.0%})")
        return "\n".join(lines)


def run(each: int, injected_each: int, progress: Callable[[str], None]) -> BlameScore:
    """Score `each` generated cases of every kind, and `injected_each` of every fault on real processes."""
    kinds = []
    for kind in KINDS:
        if each:
            kinds += _kinds("generated", [generated(kind, seed) for seed in range(each)])
            progress(f"{kind}: {kinds[-1].right} of {each}")
    if injected_each:
        kinds += _kinds("injected", all_injected(injected_each, progress))
    cases, right = sum(kind.cases for kind in kinds), sum(kind.right for kind in kinds)
    return BlameScore(tuple(kinds), cases, right, right / cases if cases else 0.0)


def _kinds(where: str, judged: Iterable[ScoredCase]) -> list[KindScore]:
    by_kind: dict[str, list[ScoredCase]] = defaultdict(list)
    for case in judged:
        by_kind[case.truth.kind].append(case)
    return [
        KindScore(
            where,
            kind,
            len(cases),
            sum(case.right for case in cases),
            tuple(f"{case.name}: {case.truth} was taken for {case.first}" for case in cases if not case.right),
        )
        for kind, cases in by_kind.items()
    ]
