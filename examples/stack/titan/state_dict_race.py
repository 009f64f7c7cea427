"""What `state_dict()` on one of two ranks does to a step of FSDP2, as TorchFT's thread calls it beside TorchTitan.

    torchrun --nproc-per-node 2 state_dict_race.py gloo|holdfast never|forward|backward

Each rank prints the sizes that it gathered, and how the step ended.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import holdfast.comms.torchdist  # noqa: F401  (registers the backend "holdfast")


def main(backend: str, when: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(backend, timeout=timedelta(seconds=15))
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    net = nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 8))
    for each in layers:
        fully_shard(each)
    fully_shard(net)
    for each in net.modules():
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    gathered: list[int] = []
    gather = dist.all_gather_single  # type: ignore[attr-defined]

    def gather_and_note(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        gathered.append(output.numel())
        return gather(output, *arguments, **options)

    def look(*_: Any) -> None:
        if dist.get_rank() == 0:
            net.state_dict()

    dist.all_gather_single = gather_and_note  # type: ignore[attr-defined]
    if when == "forward":
        layers[1].register_forward_pre_hook(look)
    how = "done"
    try:
        loss = net(torch.ones(2, 8)).sum()
        if when == "backward":
            look()
        loss.backward()
    except Exception as error:
        how = f"{type(error).__name__}: {error}"
    print(f"rank {dist.get_rank()} gathered {gathered}: {how}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
