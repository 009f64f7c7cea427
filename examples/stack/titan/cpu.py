"""What TorchTitan 0.3's own Trainer needs changed where there is no accelerator: each patch, why, and when it can go.

The trainers of a run (`rl/trainers/titan`) need none of this. Call `patch()` before any other import of torchtitan.
"""

from types import SimpleNamespace
from typing import Any

import torch


class CpuModule:
    """`torch.cpu` with what TorchTitan asks of a device's module beside it.

    Why: its metrics read name, capacity and peaks of memory, which `torch.cpu` does not have, and a device's number.
    Until: TorchTitan builds no memory monitor where there is no device memory.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {"active_bytes.all.peak": 0, "reserved_bytes.all.peak": 0}

    def reset_peak_memory_stats(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...


def patch() -> None:
    """Say "cpu" where TorchTitan says "cuda" for want of an accelerator.

    Why: `torchtitan.tools.utils` falls back to "cuda", and other modules copy that name when they are imported.
    Until: its fallback is the CPU.
    """
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", CpuModule()
    patch_timeout()


def patch_timeout() -> None:
    """`torch.distributed.set_timeout`, which TorchTitan calls after the first step, for torch 2.13.

    Why: there it has another name, and on GPUs too. Until: the torch beside it has it.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = _set_pg_timeout  # type: ignore[attr-defined]


def sum_only(parts: list[torch.nn.Module]) -> None:
    """Let `fully_shard` ask for plain sums. For gloo alone: it has no PREMUL_SUM, holdfast does.

    Until: gloo has it.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
