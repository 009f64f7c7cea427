"""Any environment of Gymnasium, with spaces as text and as fields: `pip install 'holdfast[rl,gymnasium]'`.

holdfast rl environment serve "python:examples/rl/gymnasium_environment.py:GymnasiumEnvironment?name=CartPole-v1"
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.errors import UnknownEnvironment

_NUMBER = re.compile(r"-?\d{1,18}")
_JSON = re.compile(r"\[.*\]|\{.*\}|-?\d[\d.e+-]*", re.S)


class GymnasiumEnvironment(Environment):
    """An environment of Gymnasium by its id, which must be registered there.

    Actions are the field `action` (values of JSON), or are read from the text: a number for a discrete space, JSON for
    others, the text itself for a text space. An action outside of the space costs a turn, and the environment does not
    see it. Observations are the field `observation`, and its JSON is the text.
    """

    def __init__(self, name: str) -> None:
        try:
            self._env: gymnasium.Env[Any, Any] = gymnasium.make(name)
        except gymnasium.error.Error as error:
            raise UnknownEnvironment(name, str(error)) from error
        self._last: Any = None

    def reset(self, seed: int) -> Observation:
        self._last, _ = self._env.reset(seed=seed)
        return self._observe("", None, False)

    def step(self, action: Action) -> Observation:
        given = action.fields["action"] if "action" in action.fields else _read(action.text, self._env.action_space)
        taken = _fitted(given, self._env.action_space)
        if taken is None:
            return self._observe(f"no action: the space of actions is {self._env.action_space}\n", 0.0, False)
        self._last, reward, terminated, truncated, _ = self._env.step(taken)
        return self._observe("", float(reward), bool(terminated or truncated))

    def state(self) -> Mapping[str, Any]:
        return {"observation": _plain(self._last)}

    def close(self) -> None:
        self._env.close()

    def _observe(self, said: str, reward: float | None, done: bool) -> Observation:
        plain = _plain(self._last)
        text = plain if isinstance(plain, str) else json.dumps(plain)
        return Observation(text=said + text, fields={"observation": plain}, reward=reward, done=done)


def _plain(value: Any) -> Any:
    """A value of a space as values of JSON."""
    match value:
        case np.ndarray():
            return _plain(value.tolist())
        case np.generic():
            return _plain(value.item())
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case float() if not np.isfinite(value):
            return None
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


def _read(text: str, space: spaces.Space[Any]) -> Any:
    """What a text says in a space, or None."""
    if isinstance(space, spaces.Text):
        return text
    found = (_NUMBER if isinstance(space, spaces.Discrete) else _JSON).search(text)
    try:
        return json.loads(found[0]) if found else None
    except (ValueError, RecursionError):
        return None


def _fitted(value: Any, space: spaces.Space[Any]) -> Any:
    """A value of JSON as an element of a space, or None if it is none."""
    try:
        match space:
            case spaces.Dict():
                fitted: Any = {key: _fitted(value[key], each) for key, each in space.spaces.items()}
            case spaces.Tuple():
                fitted = tuple(_fitted(given, each) for given, each in zip(value, space.spaces, strict=True))
            case spaces.Discrete():
                fitted = value if type(value) is int else None
            case spaces.Text():
                fitted = value
            case _:
                with np.errstate(over="ignore"):  # then it is not contained
                    fitted = np.asarray(value, dtype=space.dtype).reshape(space.shape or ())
        return fitted if space.contains(fitted) else None
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
