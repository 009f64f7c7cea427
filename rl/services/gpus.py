"""Gives out the GPUs of this host, one to a process, among all services of an engine."""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

import torch

from holdfast.rl.engine.engine import Engine
from holdfast.rl.services.errors import NotEnoughGpus

VISIBLE = "CUDA_VISIBLE_DEVICES"


class GpuPool:
    """The GPUs that no process has."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self._free = list(devices)

    def take(self, count: int) -> tuple[str, ...]:
        """Take `count` GPUs. Raises `NotEnoughGpus`, and takes none."""
        if count > len(self._free):
            raise NotEnoughGpus(count, len(self._free))
        taken, self._free = tuple(self._free[:count]), self._free[count:]
        return taken

    def give_back(self, devices: tuple[str, ...]) -> None:
        """Make them free again."""
        self._free.extend(devices)


_pools: WeakKeyDictionary[Engine, GpuPool] = WeakKeyDictionary()


def gpus_of(engine: Engine) -> GpuPool:
    """The pool of an engine: the GPUs that this process may see."""
    if engine not in _pools:
        seen = os.environ.get(VISIBLE)
        devices = seen.split(",") if seen else map(str, range(torch.cuda.device_count()))
        _pools[engine] = GpuPool(tuple(each.strip() for each in devices if each.strip()))
    return _pools[engine]
