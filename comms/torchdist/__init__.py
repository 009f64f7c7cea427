"""`torch.distributed` over holdfast: import this (torch 2.14 does so itself), then `init_process_group("holdfast")`.

The transport is the one that `pg_options=Options(backend=...)` names, else the environment's HOLDFAST_BACKEND, else
that of the default group, else "auto". DDP, FSDP2, DTensor, DeviceMesh, functional and object collectives and
distributed checkpoints run unchanged. If a rank dies, ops raise holdfast's typed errors; `holdfast.ft` is what recovers
from that.
"""

from holdfast.comms.torchdist.process_group import HoldfastProcessGroup, Options, behind
from holdfast.comms.torchdist.registration import BACKEND, DEVICE_BACKEND, register

__all__ = ["BACKEND", "DEVICE_BACKEND", "HoldfastProcessGroup", "Options", "behind", "register"]

register()
