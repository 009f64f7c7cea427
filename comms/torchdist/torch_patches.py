"""Patches torch functions that accept only torch's own backends, so that they accept a holdfast group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from holdfast.comms.torchdist.process_group import behind


def accept_builtin_hooks() -> None:
    """Let DDP over holdfast use the Python version of its FP16 hook: the built-in one needs C++ futures."""
    original: Callable[[Any, Any], None] = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(original)
    def register(self: Any, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        if behind(self.process_group) is None or comm_hook_type != dist.BuiltinCommHookType.FP16_COMPRESS:
            original(self, comm_hook_type)
        else:
            dist._register_comm_hook(self.reducer, self.process_group, fp16_compress_hook)

    patched: Any = DistributedDataParallel
    patched._register_builtin_comm_hook = register


def accept_monitored_barrier() -> None:
    """Let torch's `monitored_barrier`, which accepts only gloo, call that of a holdfast group."""
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        ours = behind(c10d.GroupMember.WORLD if group is None else group)
        if ours is not None:
            ours.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier
