"""What the harness and the supervisor of links say to each other over their channel."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.harness.links.policy import LinkRule, LinkTraffic


@dataclass(frozen=True, slots=True)
class SetRules:
    """From now on exactly these rules hold, and these addresses are control endpoints."""

    rules: tuple[LinkRule, ...]
    control: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class TrafficQuery:
    """What has gone over the links?"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What has gone over the links so far; to `SetRules` too, once they hold."""

    traffic: tuple[LinkTraffic, ...]


@dataclass(frozen=True, slots=True)
class SupervisorFailed:
    """The supervisor cannot go on."""

    reason: str
