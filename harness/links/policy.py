"""Policies for the bytes on a link, as data: rules for directions between processes, and how they combine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from holdfast.comms.plugins.registry import registry

Plane = Literal["all", "control", "data"]
"""Which connections: those to control endpoints (heartbeats, views), all others, or both."""

RETRANSMISSION = 0.2
"""Seconds that a lost segment costs: the least retransmission timeout of Linux's TCP."""

BULK = 4096
"""Pieces of at least so many bytes count as payload, not as headers: bits flip only in these."""


class LinkPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to the bytes of one direction.

    `delay` and `jitter` in seconds (a uniform share of the jitter is added to the delay of each piece; order is kept);
    `rate` in bytes a second, 0 for no limit; `loss` is the share of pieces that cost a retransmission; `corrupt` the
    share of pieces of payload in which one bit is flipped; `headers`: of small pieces, too; `cut`: nothing passes, and
    no end is told; `reset`: connections are reset, also new ones.
    """

    delay: float = 0.0
    jitter: float = 0.0
    rate: float = 0.0
    loss: float = 0.0
    corrupt: float = 0.0
    headers: bool = False
    cut: bool = False
    reset: bool = False

    def __post_init__(self) -> None:
        for name in ("delay", "jitter", "rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative")
        for name in ("loss", "corrupt"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is a share: from 0 to 1")

    def __and__(self, other: LinkPolicy) -> LinkPolicy:
        """Both at once: delays add up, the lower rate holds, losses are independent."""
        rates = [each.rate for each in (self, other) if each.rate > 0]
        return LinkPolicy(
            delay=self.delay + other.delay,
            jitter=self.jitter + other.jitter,
            rate=min(rates, default=0.0),
            loss=1 - (1 - self.loss) * (1 - other.loss),
            corrupt=1 - (1 - self.corrupt) * (1 - other.corrupt),
            headers=self.headers or other.headers,
            cut=self.cut or other.cut,
            reset=self.reset or other.reset,
        )


CLEAR, CUT = LinkPolicy(), LinkPolicy(cut=True)
"""Bytes pass as they come; nothing passes."""


class LinkRule(msgspec.Struct, frozen=True, kw_only=True):
    """A policy for the bytes from any of `sources` to any of `targets` (process ids; empty: from or to any)."""

    policy: LinkPolicy
    sources: frozenset[int] = frozenset()
    targets: frozenset[int] = frozenset()
    plane: Plane = "all"

    def applies(self, source: int, target: int, control: bool) -> bool:
        """Whether the rule holds from `source` to `target`; `control`: on a connection to a control endpoint."""
        if self.plane != "all" and (self.plane == "control") != control:
            return False
        return (not self.sources or source in self.sources) and (not self.targets or target in self.targets)


def between(groups: Iterable[frozenset[int]], everybody: frozenset[int]) -> list[LinkRule]:
    """The rules by which nothing passes between groups of processes; those in no group form one more."""
    named = [group for group in groups if group]
    sides = [side for side in (*named, everybody.difference(*named)) if side]
    return [LinkRule(policy=CUT, sources=a, targets=b) for a in sides for b in sides if a is not b]


def combined(rules: Iterable[LinkRule], source: int, target: int, control: bool) -> LinkPolicy:
    """The combined policy of all rules for bytes from `source` to `target`."""
    policy = CLEAR
    for rule in rules:
        if rule.applies(source, target, control):
            policy &= rule.policy
    return policy


class LinkTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic from one process to another: their ids, in a report their names.

    `lost` and `corrupted` count pieces, `reset` connections, `held` those of both that a delay, a rate or a cut held
    back.
    """

    source: str
    target: str
    plane: Plane
    connections: int
    bytes: int
    held: int = 0
    lost: int = 0
    corrupted: int = 0
    reset: int = 0


# What can be broken ---------------------------------------------------------------------------------------------------


_TCP_ALONE = frozenset(["tcp", "self"])


def unbreakable(backend: str, environ: Mapping[str, str], *, many_hosts: bool = False) -> str | None:
    """The reason why faults of links would break the control channel alone; None if all bytes pass the proxy.

    `backend` may list several in order of preference: any of them may be taken. `environ` is added to the environment
    of the ranks. `many_hosts`: each rank believes the others to be on other hosts. Raises `BackendUnavailable` for an
    unknown backend.
    """
    for name in (each.strip() for each in backend.split(",")):
        variable = registry().backend(name).info.capabilities.tcp
        if variable == "always":
            continue
        if not variable:
            return f"the {name} backend has no links to break: between processes of one host it does not go over TCP"
        value = environ.get(variable, os.environ.get(variable, ""))
        if not (set(value.split(",")) <= _TCP_ALONE if value else many_hosts):
            is_now = f"{variable} is {value!r}" if value else f"{variable} is not set"
            return f'the {name} backend has no links to break unless {variable} = "tcp,self": {is_now}'
    return None
