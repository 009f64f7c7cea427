"""The environment as its author writes it: `reset`, `step` and `state`, synchronous, one episode at a time."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.rl.errors import EnvironmentLied


class Action(msgspec.Struct, frozen=True):
    """What the policy does: the text that it wrote, or structured `fields` (values of JSON), or both."""

    text: str = ""
    fields: Mapping[str, Any] = {}


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy sees: a text, structured `fields` (values of JSON), the step's reward, and whether all is over.

    After a reset the reward is None.
    """

    text: str = ""
    fields: Mapping[str, Any] = {}
    reward: float | None = None
    done: bool = False


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Where an episode stands. `episode_id` is None before the first reset; `fields` are the environment's own."""

    episode_id: str | None = None
    step_count: int = 0
    fields: Mapping[str, Any] = {}


class Environment(ABC):
    """A task in steps. A session calls it from one thread, checks what it returns, and gives it deadlines.

    What happens after `reset(seed)` must depend on the seed and the actions alone. An exception, a call that does not
    return, or an answer of the wrong type costs this episode.
    """

    @abstractmethod
    def reset(self, seed: int) -> Observation:
        """Begin a new episode, whatever became of the last one."""

    @abstractmethod
    def step(self, action: Action) -> Observation:
        """Take an action. An action that makes no sense is answered by an observation that says so."""

    def state(self) -> Mapping[str, Any]:
        """The environment's own part of the state: values of JSON, for people to look at."""
        return {}

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Free what it holds. Called once, after the last episode, from the same thread."""


def checked(observation: object, environment: str, call: str) -> Observation:
    """Return an observation if it is one, with its reward as a float. Raises EnvironmentLied for one that cannot be."""
    if not isinstance(observation, Observation):
        raise EnvironmentLied(environment, call, f"it returned a {type(observation).__name__}, which is no Observation")
    text, fields, reward, done = observation.text, observation.fields, observation.reward, observation.done
    if type(text) is not str:
        raise EnvironmentLied(environment, call, f"the text of its observation is a {type(text).__name__}")
    if type(done) is not bool:
        raise EnvironmentLied(environment, call, f"done={done!r} is no bool")
    if not isinstance(fields, Mapping):
        raise EnvironmentLied(environment, call, f"the fields of its observation are a {type(fields).__name__}")
    if reward is None or (type(reward) is float and math.isfinite(reward)):
        return observation
    return msgspec.structs.replace(observation, reward=_finite(reward, environment, call))


def _finite(reward: object, environment: str, call: str) -> float:
    """A reward of another type, such as numpy's, as a float."""
    try:
        if isinstance(reward, numbers.Real) and math.isfinite(value := float(reward)):
            return value
    except OverflowError:
        pass
    raise EnvironmentLied(environment, call, f"reward={repr(reward)[:40]} is no finite number")
