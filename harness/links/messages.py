"""The messages between the harness and the supervisor of links, over their channel."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.harness.links.policy import LinkRule, LinkTraffic


@dataclass(frozen=True, slots=True)
class SetRules:
    """Replace all rules and all control endpoints."""

    rules: tuple[LinkRule, ...]
    control: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class TrafficQuery:
    """Ask for the traffic so far."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The traffic so far. Also the answer to `SetRules`, once the rules hold."""

    traffic: tuple[LinkTraffic, ...]


@dataclass(frozen=True, slots=True)
class SupervisorFailed:
    """The supervisor cannot go on."""

    reason: str
