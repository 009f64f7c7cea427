"""torch's group over NCCL or RCCL: which one this torch takes for "nccl", and how it is made.

torch has two. The older one is called "nccl-legacy" since there is another, "nccl2", which came from TorchComms: torch
2.14 takes it if TORCH_DIST_USE_NCCL2 is "1", torch 2.15 unless it is "0". Here it is the same one that
`init_process_group("nccl")` would make.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.backends.nccl import settings
from holdfast.backends.nccl.streams import until
from holdfast.comms.system.environment import flag
from holdfast.comms.transport.base import Context

LEGACY, NCCL2 = "nccl-legacy", "nccl2"


def kind_of_group() -> str:
    """The name of the group that this torch takes for "nccl": `LEGACY` or `NCCL2`."""
    if not hasattr(dist, "ProcessGroupNCCL2"):
        return LEGACY
    asked = os.environ.get(settings.USE_NCCL2)
    return (LEGACY if asked == "0" else NCCL2) if _connects_lazily_by_option() else (NCCL2 if asked == "1" else LEGACY)


def _connects_lazily_by_option() -> bool:
    """Whether nccl2 has the option `lazy_init`, which came with the torch that takes nccl2 by default."""
    return hasattr(dist.ProcessGroupNCCL.Options, "lazy_init")


def blocks() -> bool:
    """Whether a call of the group lasts until NCCL has connected its ranks: over the older one, unless the user asks.

    Without blocking, NCCL starts a thread for each op: 130 us of host time more with two ranks (H200, NCCL 2.28).
    """
    return kind_of_group() == LEGACY and not flag(settings.NONBLOCKING)


def make_group(context: Context, device: torch.device) -> Any:
    """Make a group that connects with its first op; its watchdog ends the group, not the process.

    Both kinds could connect eagerly, in their constructor, which nothing could end. Connecting with the first op is
    bounded: for nccl2, which does not block, by the time left to `context.deadline`. For the older one the caller
    leaves the op behind (`NcclTransport.connect_ranks`); without blocking, `settings.bound_handshakes` ends it there.
    The user's own TORCH_NCCL_USE_COMM_NONBLOCKING takes precedence.
    """
    of_torch: Any = dist.ProcessGroupNCCL
    options = of_torch.Options()
    options._timeout = until(context.deadline)
    older = kind_of_group() == LEGACY
    if not older and settings.NONBLOCKING not in os.environ:
        options.config.blocking = 0
    for name, value in context.hints.items():
        setattr(options.config, name, int(value))
    if older:
        settings.bound_handshakes()
        with settings.settings_of_a_group():
            return of_torch(context.store, context.rank, context.size, options)
    bound = (device,) if _connects_lazily_by_option() else ()  # before that option the first tensor told the device
    if bound:
        options.lazy_init = True
    newer: Any = getattr(dist, "ProcessGroupNCCL2")  # noqa: B009  # which the torch that types are checked with lacks
    with settings.settings_of_a_group():
        return newer(context.store, context.rank, context.size, options, *bound)


def set_timeout(group: Any, seconds: float) -> None:
    """Set the timeout of the ops that `group` starts from now on."""
    change = getattr(group, "_set_default_timeout", None) or group.set_timeout  # nccl2 has only the latter
    change(timedelta(seconds=seconds))
