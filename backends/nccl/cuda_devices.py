"""Count the GPUs, without initialising CUDA in a process that may fork; choose the GPU of a rank."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import torch

from holdfast.comms.transport.base import Context

_ASKING_SECONDS = 60.0
_cuda: Any = torch.cuda


def count() -> int:
    """The number of GPUs that torch sees, found without initialising CUDA in this process.

    A process that has initialised CUDA cannot use it in a forked child. So if the driver's library does not tell, a
    child process is asked.
    """
    if not _cuda._is_compiled():
        return 0
    if not _cuda.is_initialized():
        listed = int(_cuda._device_count_amdsmi() if torch.version.hip else _cuda._device_count_nvml())
        if listed < 0:
            return _asked_in_a_child(tuple(os.environ.get(name, "") for name in _VISIBLE))
    return int(_cuda.device_count())


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@functools.lru_cache(maxsize=1)
def _asked_in_a_child(visible: tuple[str, ...]) -> int:
    asking = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        answer = subprocess.run(asking, capture_output=True, text=True, timeout=_ASKING_SECONDS, check=True).stdout
        return int(answer)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def own_device(context: Context) -> torch.device:
    """Choose the GPU of this rank.

    That is the named one, else the current one, LOCAL_RANK's, or the one at the rank's place among the ranks of its
    host. Raises ValueError if the GPU does not exist: with all ranks on the first one, NCCL would refuse them or be
    slow.
    """
    there, index = count(), context.device.index
    if index is not None:
        if index >= there:
            raise ValueError(f"device={str(context.device)!r}, but torch sees {there} GPUs here")
        return context.device
    if there == 1:
        return torch.device("cuda", 0)
    if _cuda.is_initialized() and (current := _cuda.current_device()) != 0:
        return torch.device("cuda", current)
    host = context.peers[context.rank].host
    place = sum(peer.host == host for peer in context.peers[: context.rank])
    said = os.environ.get("LOCAL_RANK", "")
    for number in (int(said) if said.isdecimal() else place, place):
        if number < there:
            return torch.device("cuda", number)
    raise ValueError(
        f"device='cuda' does not say which GPU rank {context.rank} uses: it is number {place} of its host"
        f"{f', LOCAL_RANK={said}' if said else ''}, and torch sees {there} GPUs; pass device='cuda:<number>', or call "
        "torch.cuda.set_device() first"
    )
