"""One replica group of a torchft job, of one process; all groups average their gradients.

TORCHFT_LIGHTHOUSE=http://... train.py NAME BACKEND STEPS [KILL_STEP]

It trains until two groups took part in STEPS of its steps. With KILL_STEP the process ends itself with SIGKILL in such
a step, after so many: its gradients are there, so the other group goes on. At the end it prints a line of JSON.
"""

import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from holdfast_group import ProcessGroupHoldfast
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

GROUPS = {"holdfast": ProcessGroupHoldfast, "gloo": ProcessGroupGloo}


def main(name: str, backend: str, steps: int, kill_step: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    inner = torch.optim.Adam(model.parameters(), lr=1e-2)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=GROUPS[backend](timeout=timedelta(seconds=10)),
        min_replica_size=1,
        use_async_quorum=False,  # a group that joins has the weights before its first step
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=name,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=50),
        timeout=timedelta(seconds=10),
    )
    module = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    seen: list[tuple[int, int, float]] = []
    together = 0
    while together < steps:
        optimizer.zero_grad()  # configures the process group anew if other groups take part
        step, groups, index = manager.current_step(), manager.num_participants(), manager.participating_rank() or 0
        # The same samples whichever groups take part: each takes its share.
        draw = torch.Generator().manual_seed(step)
        samples, classes = torch.randn(32, 16, generator=draw), torch.randint(4, (32,), generator=draw)
        nn.functional.cross_entropy(module(samples[index::groups]), classes[index::groups]).backward()
        if kill_step and together == kill_step and groups == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if manager.current_step() > step:
            seen.append((step, groups, time.time()))
            together += groups == 2
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    said = {"name": name, "weights": hashlib.sha256(weights).hexdigest()[:12], "steps": seen}
    print(json.dumps(said), flush=True)
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int((sys.argv[4:] or ["0"])[0]))
