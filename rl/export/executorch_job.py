"""What the interpreter of ExecuTorch's environment is asked to do, and what it answers."""

from __future__ import annotations

import msgspec


class ExecutorchJob(msgspec.Struct, frozen=True, kw_only=True):
    """Export the model in the folder `model` to `draft`, for sequences of at most `length` tokens.

    Then answer `prompts` with the program, token by token, and compare with `answers`.
    """

    model: str
    draft: str
    length: int
    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    stop: tuple[int, ...]


class ExecutorchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: the largest difference of a logit from eager torch, and the one that is allowed.

    `delegated` is the share of the program's nodes that run in XNNPACK, `different` the prompts that it answers
    otherwise than the model. `seconds` is how long the export took.
    """

    nbytes: int
    difference: float
    allowed: float
    largest: float
    different: tuple[int, ...]
    delegated: float
    seconds: float
