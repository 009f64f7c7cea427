"""Reads and builds the policy in a fork of the zygote, so that the driver need not import transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from holdfast.ft.processes.forked_call import call_in_fork

T = TypeVar("T")

LIMIT_SECONDS = 3600.0
"""The most seconds for the supervised steps of a policy."""

MODEL_CODE = ("transformers.models.llama.modeling_llama",)
"""What these processes share one import of."""


async def in_policy_process(what: str, function: Callable[[], T], folder: Path) -> T:
    """What `function` returns, or raises, in a process of its own. The output of that process goes beside `folder`."""
    output = folder.with_suffix(".log")
    call = partial(call_in_fork, function, name=what, output=output, timeout=LIMIT_SECONDS, preload=MODEL_CODE)
    return await asyncio.to_thread(call)
