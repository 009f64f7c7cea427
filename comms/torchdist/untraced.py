"""`untraced`: excludes the adapter's classes from `torch.compile`.

DDP calls their methods from C++ within a compiled forward pass. Dynamo would try to compile them, and fails at fields
of process groups.
"""

from __future__ import annotations

import types
from typing import TypeVar

from torch._C._dynamo import eval_frame

C = TypeVar("C", bound=type)


def untraced(cls: C) -> C:
    """Let dynamo run the methods of a class, and all that they call, uncompiled.

    Equal to `torch.compiler.disable`, without its import of 1.7 s.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for member in vars(cls).values():
        if isinstance(member, types.FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, skip)
    return cls
