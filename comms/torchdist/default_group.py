"""Installs a session's process group as torch's default group, and removes it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError
from holdfast.comms.torchdist.options import Options
from holdfast.comms.torchdist.registration import BACKEND, register
from holdfast.comms.torchdist.session_group import SessionProcessGroup


def install(communicator: Communicator, store: dist.Store, timeout: float) -> SessionProcessGroup:
    """Make torch's default group run over `communicator`. `timeout` (seconds) is the default of its ops.

    Its subgroups meet at `store`. Raises HoldfastError if torch has a default group already: that of another library,
    or of another rank in this process.
    """
    if dist.is_initialized():
        raise HoldfastError(
            "torch.distributed has a default group in this process already; do not call init_process_group() where a "
            "session makes the group"
        )
    register()
    options = Options(backend=communicator.backend, device=communicator.device.type, over=communicator)
    dist.init_process_group(
        BACKEND,
        store=store,
        rank=communicator.rank,
        world_size=communicator.size,
        timeout=timedelta(seconds=timeout),
        pg_options=options,
    )
    group: Any = dist.group.WORLD
    assert isinstance(group, SessionProcessGroup)
    return group


def remove(group: SessionProcessGroup) -> None:
    """End the group's dependents; destroy it and its subgroups, if it is still torch's default group."""
    while group.dependents:
        group.dependents.popitem()[1].end()
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()
