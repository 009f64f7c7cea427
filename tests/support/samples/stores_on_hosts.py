"""Weight stores in processes on the hosts of a network of namespaces, told what to do by the test."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness.testbed.netns import EnterNamespace
from holdfast.store import WeightStore

OLD = -1.0
"""What the reader's tensors hold before a get."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call of a store came to.

    `error` names the type of the error, `value` is the result of the call; `found` are the values in the reader's
    tensors after a get, `mixed` the tensors that the error calls mixed.
    """

    seconds: float
    error: str = ""
    value: Any = None
    found: tuple[float, ...] = ()
    mixed: tuple[str, ...] = ()


def filled(value: float, nbytes: int) -> dict[str, torch.Tensor]:
    """One large tensor of float32 and a small one, of equal elements."""
    return {"large": torch.full((nbytes // 4,), float(value)), "small": torch.full((7,), float(value))}


class StoreOnHost:
    """A process on a host with a store open there. Calls wait for the answer, unless it is asked for later.

    It comes from the zygote, not from the test's process: UCX keeps the routes of the network that it saw first.
    """

    def __init__(self, entry: EnterNamespace, url: str, output: Path, **options: Any) -> None:
        zygote().preload("holdfast.store")
        self._process = zygote().spawn(partial(serve, entry, url, options), name=entry.name, output=output)
        self.host = self._hear(60.0)

    def publish(self, version: int, value: float, nbytes: int, **options: Any) -> Outcome:
        return self.ask("publish", version, value, nbytes, **options)

    def get(self, version: int, nbytes: int, **options: Any) -> Outcome:
        """Get a version into tensors that hold `OLD`."""
        return self.ask("get", version, nbytes, **options)

    def hosts(self, version: int) -> set[str]:
        """The hosts that keep a version."""
        return set(self.ask("hosts", version).value)

    def ask(self, call: str, *arguments: Any, **options: Any) -> Outcome:
        self.begin(call, *arguments, **options)
        return self.end()

    def begin(self, call: str, *arguments: Any, **options: Any) -> None:
        """Begin a call of `Calls`; `end` waits for it."""
        self._process.channel.send((call, arguments, options))

    def end(self) -> Outcome:
        outcome: Outcome = self._hear(90.0)
        return outcome

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone. Idempotent."""
        self._process.close()

    def close(self) -> None:
        """Close the store, and wait for the process to end."""
        self._process.channel.send(None)
        ended = self._process.wait(20.0)
        assert ended.status == 0, self._process.epitaph()

    def _hear(self, timeout: float) -> Any:
        try:
            return self._process.channel.recv(timeout)
        except ChannelClosed:
            raise AssertionError(self._process.epitaph()) from None


def serve(entry: EnterNamespace, url: str, options: dict[str, Any], channel: ProcessChannel) -> None:
    """The body of the process: open a store on a host, and do what the test asks for."""
    entry()
    os.environ["UCX_TLS"] = "tcp,self"
    events: list[tuple[str, dict[str, object]]] = []
    with WeightStore(url, observe=lambda kind, fields: events.append((kind, fields)), **options) as store:
        calls = Calls(store, events)
        channel.send(entry.name)
        while (asked := channel.recv()) is not None:
            call, arguments, more = asked
            began, calls.into = time.monotonic(), {}
            error, value = None, None
            try:
                value = getattr(calls, call)(*arguments, **more)
            except HoldfastError as raised:
                error = raised
            channel.send(
                Outcome(
                    time.monotonic() - began,
                    "" if error is None else type(error).__name__,
                    value,
                    tuple(sorted({each for tensor in calls.into.values() for each in tensor.unique().tolist()})),
                    getattr(error, "mixed", ()),
                )
            )


class Calls:
    """What a test may ask of the process for."""

    def __init__(self, store: WeightStore, events: list[tuple[str, dict[str, object]]]) -> None:
        self.store, self._events = store, events
        self.into: dict[str, torch.Tensor] = {}
        self.model: dict[str, torch.Tensor] = {}
        """Weights that `step` changes, or `follow` brings up to date."""

    def publish(self, version: int, value: float, nbytes: int, **options: Any) -> None:
        self.store.publish(version, filled(value, nbytes), **options)

    def get(self, version: int, nbytes: int, **options: Any) -> int:
        self.into = filled(OLD, nbytes)
        return self.store.get(version, self.into, **options)

    def hosts(self, version: int) -> list[str]:
        return [each.peer.host.rpartition("/")[2] for each in self.store.holders(version)]

    def versions(self) -> list[int]:
        return self.store.versions()

    def events(self) -> list[tuple[str, dict[str, object]]]:
        """The events of the store so far, with their fields."""
        return list(self._events)

    def step(self, version: int, nbytes: int, share: float) -> tuple[float, int]:
        """Change a share of bf16 weights, and publish them; returns the seconds of publish, and the sum of the bits."""
        bits = self.model.setdefault("w", torch.randn(nbytes // 2, dtype=torch.bfloat16)).view(torch.int16)
        where = torch.randint(0, len(bits), (int(len(bits) * share),))
        bits[where] ^= 1
        began = time.monotonic()
        self.store.publish(version, self.model)
        return time.monotonic() - began, int(bits.long().sum())

    def follow(self, version: int, nbytes: int) -> tuple[float, int]:
        """Get a version into the same tensors each time; returns the seconds, and the sum of the bits."""
        target = self.model.setdefault("w", torch.empty(nbytes // 2, dtype=torch.bfloat16))
        began = time.monotonic()
        self.store.get(version, self.model)
        return time.monotonic() - began, int(target.view(torch.int16).long().sum())
