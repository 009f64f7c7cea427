"""Ranks as threads that connect through one rendezvous."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from holdfast import comms


def in_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Call `body(rank)` in a thread each; results or exceptions by rank."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def total(comm: comms.Communicator) -> float:
    tensor = torch.tensor([float(comm.rank + 1)])
    with comm:
        comm.all_reduce(tensor)
    return tensor.item()
