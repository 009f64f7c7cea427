"""Keeps `torch.compile` out of the adapter: dynamo would compile its methods, and refuses fields of process groups.

DDP calls them from C++ in the midst of a compiled forward pass.
"""

from __future__ import annotations

import types
from typing import TypeVar

from torch._C._dynamo import eval_frame

C = TypeVar("C", bound=type)


def untraced(cls: C) -> C:
    """Let dynamo run the methods of a class, and all that they call, as they are.

    As `torch.compiler.disable` does, which takes an import of 1.7 s.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for member in vars(cls).values():
        if isinstance(member, types.FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, skip)
    return cls
