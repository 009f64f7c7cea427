"""Chooses the replica for a call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import msgspec
import xxhash

from holdfast.rl.services.replica import ServiceReplica

Policy = Literal["least_loaded", "round_robin"]


class RouteChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose: by `policy`, or with a `key` always the same replica while that is ready."""

    policy: Policy = "least_loaded"
    key: Hashable = None
    avoid: frozenset[str] = frozenset()
    """Replicas that are chosen only if there is no other."""


class Router:
    """Chooses the replica for a call: the next in turn, the least loaded, or that of a key."""

    def __init__(self) -> None:
        self._last = -1
        self._chosen = 0

    def choose(self, replicas: Sequence[ServiceReplica], choice: RouteChoice) -> ServiceReplica | None:
        """The replica for a call, with one more call in flight; None if the call has to wait."""
        others = [each for each in replicas if each.name not in choice.avoid and each.health == "ready"]
        replicas = others or replicas
        if choice.key is not None:
            ready = [each for each in replicas if each.health == "ready"]
            found = max(ready, key=lambda each: affinity(choice.key, each.slot), default=None)
            if found is not None and not found.routable:
                found = None
        else:
            free = [each for each in replicas if each.routable]
            if choice.policy == "round_robin":
                later = [each for each in free if each.slot > self._last]
                found = min(later or free, key=lambda each: each.slot, default=None)
                self._last = found.slot if found is not None else self._last
            else:
                found = min(free, key=lambda each: (each.load, each.used), default=None)
        if found is not None:
            self._chosen += 1
            found.used = self._chosen
            found.outstanding += 1
        return found


def affinity(key: Hashable, slot: int) -> int:
    """Rendezvous hashing: without a slot, only its own keys move."""
    return xxhash.xxh3_64_intdigest(repr((key, slot)).encode())
