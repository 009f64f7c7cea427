"""Python that is not to be trusted: run behind walls, within limits, and judged by tests that it cannot fool.

    with Sandbox() as sandbox:
        result = sandbox.run("print(1 + 1)", limits=Limits(cpu_seconds=1.0))
        share = run_tests(solution, [CallTest("add", (1, 2), 3)], sandbox=sandbox).fraction

What is walled off, by which mechanism, and what is not: docs/concepts/sandbox.md.
"""

from holdfast.rl.environments.sandbox.limits import Limits, SandboxError, SandboxLost, SandboxResult, SandboxUnavailable
from holdfast.rl.environments.sandbox.run_tests import (
    CallTest,
    CodeTest,
    OutputTest,
    SolutionResult,
    Verdict,
    run_tests,
)
from holdfast.rl.environments.sandbox.sandbox import Sandbox

__all__ = [
    "CallTest",
    "CodeTest",
    "Limits",
    "OutputTest",
    "Sandbox",
    "SandboxError",
    "SandboxLost",
    "SandboxResult",
    "SandboxUnavailable",
    "SolutionResult",
    "Verdict",
    "run_tests",
]
