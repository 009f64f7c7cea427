"""What child processes do with a weight store in tests: hold replicas, or publish a version and die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from torch import Tensor

from holdfast.store import WeightStore
from support.children import Child

Holders = Callable[[int], list[Child]]
"""A function that starts so many stores of other processes, which keep replicas."""


def a_holder(pipe: Connection, url: str) -> None:
    """Keep replicas until the parent sends a message; sends the list of versions once the store is open."""
    with WeightStore(url) as held:
        pipe.send(held.versions())
        pipe.recv()


def a_publisher(
    pipe: Connection, url: str, version: int, state: Callable[[], Mapping[str, Tensor]], point: str, replicas: int = 2
) -> None:
    """Publish `state()` as a version; at the store's event `point` send its name and die by SIGKILL."""

    def observe(kind: str, fields: dict[str, object]) -> None:
        if kind == point:
            pipe.send(kind)
            os.kill(os.getpid(), signal.SIGKILL)

    with WeightStore(url, replicas=replicas, observe=observe) as store:
        store.publish(version, state())
    pipe.send("survived")
