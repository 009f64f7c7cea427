"""Scores blame: the share of cases in which the right rank comes first, by kind of fault.

`PYTHONPATH=tests python -m support.programs.blame_score 400 --injected 10`: so many generated cases of each kind, and
so many of each fault in real processes. Exit status: 1 if the share is below 99%.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec

from support.blame.cases import KINDS, ScoredCase, generated
from support.blame.injected import all_injected

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


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(prog="support.programs.blame_score")
    parser.add_argument("generated", type=int, help="generated cases of each kind")
    parser.add_argument("--injected", type=int, default=0, help="cases of each fault in real processes")
    asked = parser.parse_args()
    result = run(asked.generated, asked.injected, lambda text: print(text, file=sys.stderr))
    print(result.table())
    sys.exit(0 if result.passed else 1)


if __name__ == "__main__":
    main()
