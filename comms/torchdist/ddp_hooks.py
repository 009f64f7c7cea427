"""DDP's built-in communication hooks over holdfast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def accept_builtin_hooks() -> None:
    """torch's built-in FP16 hook takes futures of C++ alone: over holdfast let DDP use its equal in Python."""
    original: Callable[[Any, Any], None] = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(original)
    def register(self: Any, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        from holdfast.comms.torchdist.trampoline import behind

        if behind(self.process_group) is None or comm_hook_type != dist.BuiltinCommHookType.FP16_COMPRESS:
            original(self, comm_hook_type)
        else:
            dist._register_comm_hook(self.reducer, self.process_group, fp16_compress_hook)

    patched: Any = DistributedDataParallel
    patched._register_builtin_comm_hook = register
