"""Readers and proposers of a fleet in processes of their own, which die where a test says."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from holdfast.comms.errors import HoldfastError
from holdfast.store import WeightStore
from holdfast.store.follow.staged_versions import StagedVersions
from holdfast.store.follow.staging import StagingState
from support.weights.state_dicts import value_of, weights


def a_reader(pipe: Connection, url: str, name: str, dies: str = "", version: int = 0) -> None:
    """Follow as `name`, and answer orders.

    "swap" and "catch up" are answered with what is served then, "ready N" once it is.

    Dies while it stages `version` if `dies` is "staging", with its bytes but before it says so if "staged".
    """
    into, told = weights(-1), threading.Event()
    die_at(pipe, dies, version, told)
    with WeightStore(url, hold=False) as store, store.follow(into, reader=name) as follower:
        pipe.send("follows")
        told.set()
        while (order := pipe.recv()) != "end":
            try:
                if order.startswith("ready"):
                    follower.wait_ready(int(order.split()[1]), 15.0)
                    pipe.send("ready")
                else:
                    served = follower.swap() if order == "swap" else follower.catch_up(15.0)
                    assert value_of(into) == served
                    pipe.send(served)
            except HoldfastError as error:
                pipe.send(type(error).__name__)


def die_at(pipe: Connection, dies: str, version: int, told: threading.Event) -> None:
    complete, fill = StagedVersions.complete, StagedVersions.fill

    def die() -> None:
        told.wait()  # a thread of the follower may be here before the test has been told that it follows
        pipe.send("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    def filled(self: StagedVersions, found: StagingState, number: int, *more: Any) -> None:
        fill(self, found, number, *more)
        if dies == "staging" and number == version:
            die()

    def completed(self: StagedVersions, found: StagingState) -> None:
        if dies == "staged" and found.version == version:
            die()
        complete(self, found)

    StagedVersions.fill, StagedVersions.complete = filled, completed  # type: ignore[method-assign]


def a_proposer(
    pipe: Connection,
    url: str,
    version: int,
    readers: list[str] | None = None,
    dies: str = "",
    timeout: float = 15.0,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Switch the fleet, and send the result; at the store's event `dies` send its name and die by SIGKILL."""
    prepare()

    def observe(kind: str, fields: dict[str, object]) -> None:
        if kind == dies:
            pipe.send(kind)
            os.kill(os.getpid(), signal.SIGKILL)

    with WeightStore(url, hold=False, observe=observe) as store:
        pipe.send(store.switch(version, readers, timeout=timeout))
