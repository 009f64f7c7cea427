"""The example of a coder environment: right answers pass its tests, and no other way to pass was found."""

from __future__ import annotations

import enum
import json
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.rl.config.named_code import load_code
from holdfast.rl.environments.environment import Action
from holdfast.rl.environments.registry import open_session
from holdfast.rl.environments.sandbox import Limits, Sandbox, SandboxError
from holdfast.rl.errors import EpisodeOver
from support.source_tree import ROOT

NAME = f"python:{ROOT / 'examples' / 'rl' / 'coder.py'}:CoderEnvironment"
coder: Any = sys.modules[load_code(NAME.removeprefix("python:")).__module__]
CallTest, OutputTest, encode = coder.CallTest, coder.OutputTest, coder.encode
equals, is_plain, run_tests = coder.equals, coder.is_plain, coder.run_tests
FAMILIES, coding_problem, judge = coder.FAMILIES, coder.coding_problem, coder.judge

SECRET = 987654321987654321
TESTS = (CallTest("f", (2,), SECRET), CallTest("f", (3,), SECRET + 1))
LIMITS = Limits(cpu_seconds=1.0, wall_seconds=20.0)

CHEATS = {
    "exit at once": "import os; os._exit(0)",
    "exit in the call": "import os\ndef f(x): os._exit(0)",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "an object that equals all": "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "an int that equals all": "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A(1)",
    "an int with another text": "class A(int):\n    __repr__ = __str__ = lambda self: '987654321987654321'\n"
    "def f(x): return A(1)",
    "patched equality": "import operator, builtins\noperator.eq = builtins.all = lambda *_: True\ndef f(x): return 1",
    "patched json": "import json\njson.dumps = lambda value: 'true'\ndef f(x): return 1",
    "patched unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\ndef f(x): return 1",
    "no assertions": "import builtins\nclass A(Exception): pass\nbuiltins.AssertionError = A\ndef f(x): return 1",
    "a trace function": "import sys\nsys.settrace(lambda *_: None)\ndef f(x): return 1",
    "a verdict on every descriptor": "import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'{\"status\": 0}')\n"
    "    except OSError: pass\nos._exit(0)",
    "a verdict at the exit": "import atexit, os\natexit.register(os.write, 3, b'true')\ndef f(x): return 1",
    "search the frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
    "            if isinstance(value, int) and value > 10**17: return value\n        frame = frame.f_back",
    "search the memory": "import gc, re\ndef f(x):\n    for thing in gc.get_objects():\n"
    "        text = str(thing)[:10**6]\n        found = re.search('98765[0-9]{13}', text)\n"
    "        if found: return int(found[0])",
    "read the tests": "import glob\n"
    "def f(x): return [open(name).read() for name in glob.glob('/**/*test*', recursive=True)]",
    "answers of the test before": "import os\ndef f(x):\n    if os.path.exists('a'): return int(open('a').read())\n"
    "    open('a', 'w').write('987654321987654321'[::-1])",
    "a child that passes": "import os\nif os.fork() == 0: os.write(3, b'true'); os._exit(0)\nos._exit(0)",
    "another entry point": "import sys\nsys.modules['solution'] = object()\nglobals().clear()",
    "print the word": "print('PASSED 2/2 OK')\ndef f(x): print('PASSED')",
    "end the first process": "import os\ndef f(x): os.kill(1, 9); os.kill(os.getppid(), 15)",
    "an endless generator": "def f(x):\n    while True: yield 1",
    "very deep": "def f(x):\n    for _ in range(10**5): x = [x]\n    return x",
    "very long": "def f(x): return 'x' * 10**7",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_passes_no_test(cheat: str, sandbox: Sandbox) -> None:
    assert run_tests(CHEATS[cheat], TESTS, LIMITS, sandbox=sandbox).passed == 0
    printed = (OutputTest("2\n", f"{SECRET}\n"),)
    assert run_tests(CHEATS[cheat], printed, LIMITS, sandbox=sandbox).passed == 0


def test_the_reward_is_the_share_of_tests_that_passed(sandbox: Sandbox) -> None:
    tests = [CallTest("double", (x,), 2 * x) for x in range(4)]
    result = run_tests("def double(x):\n    return 2 * x if x else None", tests, sandbox=sandbox)
    assert [verdict.passed for verdict in result.verdicts] == [False, True, True, True]
    assert result.fraction == 0.75


def test_a_program_is_judged_by_what_it_prints(sandbox: Sandbox) -> None:
    tests = [OutputTest("1 2\n", "3"), OutputTest("5 5\n", "10\n"), OutputTest("1 1\n", "3")]
    result = run_tests("print(sum(map(int, input().split())), ' ')", tests, sandbox=sandbox)
    assert [verdict.passed for verdict in result.verdicts] == [True, True, False]


def test_a_right_answer_from_a_run_that_fails_does_not_count(sandbox: Sandbox) -> None:
    code = "import os, atexit\natexit.register(os._exit, 3)\ndef f(x): return x"
    assert run_tests(code, [CallTest("f", (1,), 1)], sandbox=sandbox).passed == 0


def test_an_endless_loop_costs_two_timeouts_and_not_one_for_each_test(sandbox: Sandbox) -> None:
    limits = Limits(cpu_seconds=0.2, wall_seconds=20.0)
    result = run_tests("while True: pass", [CallTest("f", (i,), i) for i in range(50)], limits, sandbox=sandbox)
    assert [verdict.reason for verdict in result.verdicts] == ["timeout"] * 2 + [None] * 48


scalars = st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.binary()
keys = scalars | st.tuples(scalars, scalars) | st.frozensets(scalars, max_size=3)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(keys, max_size=4)
    ),
    max_leaves=12,
)


@given(plain, plain)
@example({frozenset({b"a", "a", "b", b"c"}): None}, None)
def test_after_the_way_out_a_value_equals_itself_and_others_as_python_compares_them(one: object, other: object) -> None:
    assert is_plain(one)
    assert equals(json.dumps(encode(one)).encode(), one)
    if one == other:
        assert equals(json.dumps(encode(one)).encode(), other)
    elif "float" not in json.dumps([encode(one), encode(other)]):
        assert not equals(json.dumps(encode(one)).encode(), other)


Point = namedtuple("Point", "x y")
Colour = enum.IntEnum("Colour", {"RED": 3})
Word = type("Word", (str,), {})

EQUAL: list[tuple[object, object]] = [
    (Counter("aab"), {"a": 2, "b": 1}),
    (defaultdict(int, a=1), {"a": 1}),
    (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
    (Point(1, 2), (1, 2)),
    (Colour.RED, 3),
    (Word("a"), "a"),
    (bytearray(b"a"), b"a"),
    (True, 1),
    ({1.0, 2}, {1, 2.0}),
    (frozenset({1}), {1}),
    ({1.0: "a", "b": 2, (1, 2): 3, None: 4}, {"b": 2.0, None: 4, (1.0, 2): 3, 1: "a"}),
    (0.1 + 0.2, 0.3),
    ([0.1 + 0.2], [0.3]),
    ({(0.3, "x"): [0.1 + 0.2]}, {(0.3, "x"): [0.3]}),
    (float("nan"), float("nan")),
    (10.0**12, 10**12),
]
UNEQUAL: list[tuple[object, object]] = [
    (1e12 + 10, 10**12),
    (10**12, 1e12 + 10),
    (float(10**17 + 1), 10**17 + 1),
    (2.9999999999999996, 3),
    ((1, 2), [1, 2]),
    ("a", b"a"),
    ({0.1, 0.2}, {0.1, 0.3}),
    ({0.1 + 0.2, 7}, {0.3, 7}),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"a": 1, "b": 1}),
    ([1], [1, 1]),
    (None, 0),
    (len, 3),
]


def test_a_right_answer_passes_whatever_its_type_is_called_and_only_floats_are_rounded() -> None:
    for pairs, equal in ((EQUAL, True), (UNEQUAL, False)):
        for value, expected in pairs:
            assert equals(json.dumps(encode(value)).encode(), expected) is equal, (value, expected)


@given(st.binary() | st.text(alphabet='[]{}"intdcsefloab0123,x.-').map(str.encode), plain)
def test_no_text_of_a_run_harms_the_comparison(text: bytes, expected: object) -> None:
    assert equals(text, expected) in (True, False)


def test_hostile_values_are_compared_in_time() -> None:
    assert not equals(b"[" * 500_000, [])
    assert not equals(b'["int", "' + b"9" * 900_000 + b'"]', 1)
    colliding = json.dumps(["set", [["int", hex(i * (2**61 - 1))] for i in range(30_000)]]).encode()
    assert not equals(colliding, {1})
    assert not equals(json.dumps(["set", [["frozenset", json.loads(colliding)[1]]]]).encode(), {1})


@settings(max_examples=10)
@given(value=plain)
def test_every_plain_argument_arrives(sandbox: Sandbox, value: object) -> None:
    assert run_tests("def f(x): return x", [CallTest("f", (value,), value)], sandbox=sandbox).passed == 1


def test_no_test_and_one_that_could_never_pass_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="got no test"):
        run_tests("", [], sandbox=sandbox)
    for value in (object(), [len], {"a": 1j}, CallTest("f", (), 1)):
        for arguments, expected in (((), value), ((value,), 1)):
            with pytest.raises(SandboxError, match="cannot be compared from outside"):
                CallTest("f", arguments, expected)


# -- problems by seed, as an environment


def test_a_seed_is_a_problem_and_there_are_hundreds_of_every_family() -> None:
    problems = [coding_problem(seed) for seed in range(500)]
    assert problems == [coding_problem(seed) for seed in range(500)]
    assert {problem.family for problem in problems} == set(FAMILIES)
    assert len({problem.prompt for problem in problems}) > 450
    assert len(coding_problem(2**63, 5).tests) == 5


def test_the_solution_of_every_family_passes_all_tests_and_an_empty_answer_none(sandbox: Sandbox) -> None:
    problems = {problem.family: problem for problem in map(coding_problem, range(300))}
    assert problems.keys() == FAMILIES.keys()
    for problem in problems.values():
        assert judge(problem, f"So:\n```python\n{problem.solution}```\n", sandbox).fraction == 1.0
        assert judge(problem, "I cannot.", sandbox).fraction == 0.0


async def test_an_episode_is_one_turn_and_a_wrong_answer_hears_what_failed(sandbox: Sandbox) -> None:
    async with open_session(f"{NAME}?tests=3") as session:
        assert "Write a Python function" in (await session.reset(7)).text
        over = await session.step(Action(coding_problem(7, 3).solution))
        assert (over.reward, over.done, over.text) == (1.0, True, "3 of 3 tests passed")
        with pytest.raises(EpisodeOver):
            await session.step(Action("more"))
        await session.reset(7)
        name = coding_problem(7).tests[0].function
        over = await session.step(Action(f"```python\ndef {name}(x): return 1 / 0\n```"))
        assert (over.reward, over.done) == (0.0, True)
        assert over.text == "0 of 3 tests passed; the first that failed: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("first\n```\na\n```\nbetter\n```py\nb\n```\nend", "b\n"),
        ("a = 1", "a = 1"),
        ("```python\na\n", "```python\na\n"),
        ("```json\n{}\n```\n```python\na\n```", "a\n"),
        ("x" * 200_000, ""),
    ],
)
def test_the_last_block_of_python_is_the_answer(answer: str, code: str) -> None:
    assert coder.extract_code(answer) == code


@given(st.text(alphabet="`python\n ax"))
def test_the_code_is_some_text_of_the_answer(answer: str) -> None:
    assert coder.extract_code(answer) in answer
