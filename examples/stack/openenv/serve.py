"""One of holdfast's environments behind OpenEnv's own server: a program for the interpreter of `make extra-openenv`.

.venv/extras/openenv/bin/python examples/stack/openenv/serve.py guess 8000
openenv validate --url http://127.0.0.1:8000
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import ConcurrencyConfig, create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import Field

from holdfast.rl.environments import environment as ours
from holdfast.rl.environments.registry import environment_factory


class TextAction(Action):
    """What the policy wrote, or structured fields."""

    text: str = ""
    fields: dict[str, Any] = Field(default_factory=dict)


class TextObservation(Observation):
    """What the policy sees."""

    text: str = ""
    fields: dict[str, Any] = Field(default_factory=dict)


class Adapter(Environment[TextAction, TextObservation, State]):
    """An environment of holdfast, as OpenEnv calls it."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    name = "guess"

    def __init__(self) -> None:
        super().__init__()
        self._environment = environment_factory(self.name)()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> TextObservation:
        self._state = State(episode_id=episode_id)
        seed = random.getrandbits(31) if seed is None else seed
        return self._shown(ours.checked(self._environment.reset(seed), self.name, "reset"))

    def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        self._state.step_count += 1
        taken = self._environment.step(ours.Action(action.text, action.fields))
        return self._shown(ours.checked(taken, self.name, "step"))

    def close(self) -> None:
        self._environment.close()

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name=self.name, description=type(self._environment).__doc__ or "")

    @property
    def state(self) -> State:
        return self._state

    def _shown(self, seen: ours.Observation) -> TextObservation:
        return TextObservation(text=seen.text, fields=dict(seen.fields), reward=seen.reward, done=seen.done)


if __name__ == "__main__":
    Adapter.name = sys.argv[1]
    limits = ConcurrencyConfig(max_concurrent_envs=8)
    app = create_fastapi_app(Adapter, TextAction, TextObservation, concurrency_config=limits)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
