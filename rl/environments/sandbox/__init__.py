"""Python that is not to be trusted: run behind walls, within limits.

    with Sandbox() as sandbox:
        result = sandbox.run("print(1 + 1)", limits=Limits(cpu_seconds=1.0))

What is walled off, by which mechanism, and what is not: docs/concepts/sandbox.md.
"""

from holdfast.rl.environments.sandbox.limits import Limits, SandboxError, SandboxResult, SandboxUnavailable
from holdfast.rl.environments.sandbox.sandbox import Sandbox

__all__ = ["Limits", "Sandbox", "SandboxError", "SandboxResult", "SandboxUnavailable"]
