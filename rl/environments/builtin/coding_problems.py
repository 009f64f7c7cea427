"""Small programming problems by seed: families of functions, each with a number that the seed chooses, and tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from holdfast.rl.environments.sandbox import CallTest


class CodingProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A task in words, tests that its answer must pass, and a solution that does, for demonstrations."""

    family: str
    prompt: str
    tests: tuple[CallTest, ...]
    solution: str


Inputs = Callable[[random.Random], tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class ProblemFamily:
    """What the function does, with `{k}` for the number; how it is written; arguments for tests."""

    signature: str
    task: str
    body: str
    inputs: Inputs


def _numbers(source: random.Random) -> tuple[object, ...]:
    return ([source.randint(-30, 30) for _ in range(source.randint(0, 12))],)


def _number(source: random.Random) -> tuple[object, ...]:
    return (source.randint(0, 10 ** source.randint(1, 6)),)


def _words(source: random.Random) -> tuple[object, ...]:
    return (" ".join("".join(source.choices("abcxyz", k=source.randint(1, 12))) for _ in range(source.randint(1, 8))),)


def _runs(source: random.Random) -> tuple[object, ...]:
    return ("".join(source.choice("abc") * source.randint(1, 12) for _ in range(source.randint(0, 6))),)


FAMILIES = {
    "multiples": ProblemFamily(
        "numbers", "the sum of the numbers that {k} divides", "sum(n for n in numbers if n % {k} == 0)", _numbers
    ),
    "rotated": ProblemFamily(
        "numbers",
        "the list rotated to the left by {k} places",
        "[numbers[(i + {k}) % len(numbers)] for i in range(len(numbers))]",
        _numbers,
    ),
    "chunks": ProblemFamily(
        "numbers",
        "a list of lists: the numbers in pieces of {k}, the last one perhaps shorter",
        "[numbers[i:i + {k}] for i in range(0, len(numbers), {k})]",
        _numbers,
    ),
    "clamped": ProblemFamily(
        "numbers",
        "the list with each number below -{k} replaced by -{k} and each above {k} by {k}",
        "[max(-{k}, min({k}, n)) for n in numbers]",
        _numbers,
    ),
    "largest": ProblemFamily(
        "numbers",
        "the {k} largest numbers in descending order; all of them if there are fewer",
        "sorted(numbers, reverse=True)[:{k}]",
        _numbers,
    ),
    "remainders": ProblemFamily(
        "numbers",
        "a dict from each remainder modulo {k} that occurs to the list of the numbers with it, in their order",
        "{{r: [n for n in numbers if n % {k} == r] for r in {{n % {k} for n in numbers}}}}",
        _numbers,
    ),
    "digits": ProblemFamily(
        "number", "the sum of its decimal digits, times {k}", "{k} * sum(map(int, str(number)))", _number
    ),
    "powers": ProblemFamily(
        "number",
        "the largest power of {k} that is at most the number, or 0 for 0",
        "max(({k} ** i for i in range(21) if {k} ** i <= number), default=0)",
        _number,
    ),
    "long_words": ProblemFamily(
        "text", "how many of its words have more than {k} letters", "sum(len(w) > {k} for w in text.split())", _words
    ),
    "shifted": ProblemFamily(
        "text",
        "the text with each letter moved on by {k} in the alphabet, z being followed by a; spaces stay",
        "''.join(chr((ord(c) - 97 + {k}) % 26 + 97) if c != ' ' else c for c in text)",
        _words,
    ),
    "long_runs": ProblemFamily(
        "text",
        "a list of the characters that begin a run of at least {k} equal ones, in order",
        "[c for c, run in __import__('itertools').groupby(text) if len(list(run)) >= {k}]",
        _runs,
    ),
    "every": ProblemFamily("text", "every {k}th character, beginning with the first", "text[::{k}]", _runs),
}
"""Each with the numbers 2 to 9: some hundred tasks, and any number of tests of each."""


def coding_problem(seed: int, tests: int = 8) -> CodingProblem:
    """The problem of a seed: the same wherever it is made."""
    source = random.Random(seed)
    name = source.choice(sorted(FAMILIES))
    family, number = FAMILIES[name], source.randint(2, 9)
    body, function = family.body.format(k=number), f"{name}_{number}"
    solve = eval(f"lambda {family.signature}: {body}")
    cases = [family.inputs(source) for _ in range(tests + 1)]
    checked = tuple(CallTest(function, arguments, solve(*arguments)) for arguments in cases)
    example = checked[0]
    call = f"{function}({', '.join(map(repr, example.arguments))})"
    task = family.task.format(k=number)
    return CodingProblem(
        family=name,
        prompt=f"Write a Python function `{function}({family.signature})` that returns {task}.\n"
        f"For example, `{call}` is `{example.expected!r}`.\nAnswer with one block of code.\n",
        tests=checked[1:],
        solution=f"def {function}({family.signature}):\n    return {body}\n",
    )
