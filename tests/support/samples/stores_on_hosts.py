"""Weight stores in processes on the hosts of a network of namespaces, told what to do by the test."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness.testbed.netns import EnterNamespace
from holdfast.store import Follower, WeightStore

OLD = -1.0
"""What the reader's tensors hold before a get."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call of a store came to.

    `error` names the type of the error, `why` is its text, `value` the result of the call; `found` are the values in
    the reader's tensors after a get, `mixed` the tensors that the error calls mixed.
    """

    seconds: float
    error: str = ""
    why: str = ""
    value: Any = None
    found: tuple[float, ...] = ()
    mixed: tuple[str, ...] = ()


def weights(value: float, nbytes: int) -> dict[str, torch.Tensor]:
    """One large tensor of float32 and a small one, of equal elements."""
    return {"large": torch.full((nbytes // 4,), float(value)), "small": torch.full((7,), float(value))}


class StoreOnHost:
    """A process on a host with a store open there. Calls wait for the answer, unless it is asked for later.

    It comes from the zygote, not from the test's process: UCX keeps the routes of the network that it saw first.
    """

    def __init__(self, entry: EnterNamespace, url: str, output: Path, **options: Any) -> None:
        zygote().preload("holdfast.store")
        self._process = zygote().spawn(partial(serve, entry, url, options), name=entry.name, output=output)
        self.pid = self._process.pid
        self.host = self._hear(60.0)

    def publish(self, version: int, value: float, nbytes: int, **options: Any) -> Outcome:
        return self.ask("publish", version, value, nbytes, **options)

    def get(self, version: int, nbytes: int, **options: Any) -> Outcome:
        """Get a version into tensors that hold `OLD`."""
        return self.ask("get", version, nbytes, **options)

    def hosts(self, version: int) -> set[str]:
        """The hosts that keep a version."""
        return set(self.ask("hosts", version).value)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """The events of the store so far, with their fields."""
        found: list[tuple[str, dict[str, Any]]] = self.ask("events").value
        return found

    def ask(self, call: str, *arguments: Any, **options: Any) -> Outcome:
        self.begin(call, *arguments, **options)
        return self.end()

    def begin(self, call: str, *arguments: Any, **options: Any) -> None:
        """Begin a call; `end` waits for it."""
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
    with WeightStore(url, observe=lambda kind, fields: _events.append((kind, fields)), **options) as store:
        channel.send(entry.name)
        while (asked := channel.recv()) is not None:
            call, arguments, more = asked
            began = time.monotonic()
            into = weights(OLD, arguments[1]) if call == "get" else {}
            error, value = None, None
            try:
                value = CALLS[call](store, into, *arguments, **more)
            except HoldfastError as raised:
                error = raised
            channel.send(
                Outcome(
                    time.monotonic() - began,
                    "" if error is None else type(error).__name__,
                    "" if error is None else str(error),
                    value,
                    tuple(sorted({each for tensor in into.values() for each in tensor.unique().tolist()})),
                    getattr(error, "mixed", ()),
                )
            )


def _publish(store: WeightStore, _: object, version: int, value: float, nbytes: int, **options: Any) -> None:
    store.publish(version, weights(value, nbytes), **options)


_events: list[tuple[str, dict[str, object]]] = []


_model: dict[str, torch.Tensor] = {}
"""The weights of this process that `_step` changes, or `_follow` brings up to date."""


def _step(store: WeightStore, _: object, version: int, nbytes: int, share: float) -> tuple[float, int]:
    """Change a share of bf16 weights, and publish them; returns the seconds of publish, and the sum of the bits."""
    bits = _model.setdefault("w", torch.randn(nbytes // 2, dtype=torch.bfloat16)).view(torch.int16)
    where = torch.randint(0, len(bits), (int(len(bits) * share),))
    bits[where] ^= 1
    began = time.monotonic()
    store.publish(version, _model)
    return time.monotonic() - began, int(bits.long().sum())


def _follow(store: WeightStore, _: object, version: int, nbytes: int) -> tuple[float, int]:
    """Get a version into the same tensors each time; returns the seconds, and the sum of the bits."""
    target = _model.setdefault("w", torch.empty(nbytes // 2, dtype=torch.bfloat16))
    began = time.monotonic()
    store.get(version, _model)
    return time.monotonic() - began, int(target.view(torch.int16).long().sum())


_followers: list[tuple[Follower, dict[str, torch.Tensor]]] = []
"""The follower of this process, and its tensors."""


def _swap(store: WeightStore, _: object, version: int, nbytes: int) -> float:
    """Follow the store, if this process does not yet; swap a version in, and return its value."""
    if not _followers:
        model = weights(OLD, nbytes)
        _followers.append((store.follow(model, timeout=60.0), model))
    follower, model = _followers[0]
    follower.wait_ready(version)
    assert follower.swap() == version
    (value,) = {each for tensor in model.values() for each in tensor.unique().tolist()}
    return float(value)


def _received(store: WeightStore, _: object) -> int:
    """The bytes that this host has received over the network."""
    (line,) = [each for each in Path("/proc/thread-self/net/dev").read_text().splitlines() if "eth0:" in each]
    return int(line.partition(":")[2].split()[0])


CALLS: dict[str, Callable[..., Any]] = {
    "publish": _publish,
    "get": lambda store, into, version, _, **options: store.get(version, into, **options),
    "hosts": lambda store, _, version: [each.peer.host.rpartition("/")[2] for each in store.holders(version)],
    "versions": lambda store, _: store.versions(),
    "events": lambda store, _: list(_events),
    "step": _step,
    "follow": _follow,
    "swap": _swap,
    "received": _received,
}
