"""Any game of TextArena; the policy plays its players in turn: `pip install 'holdfast[rl,textarena]'`.

holdfast rl environment serve "python:examples/rl/textarena_game.py:TextArenaEnvironment?name=Wordle-v0"
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import textarena

from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.errors import UnknownEnvironment

_global_random = threading.Lock()
"""Games draw from the module `random`. Each gets a state of its own there, one call at a time."""


class TextArenaEnvironment(Environment):
    """A game of TextArena by its id. With `players` over 1 the policy plays each when it is that one's turn.

    An observation's field `player` is the player that moves next. The reward comes with the last step, and is player
    0's; the others' are in the field `rewards`.
    """

    def __init__(self, name: str, players: int = 1) -> None:
        try:
            self._game = textarena.make(env_id=name)
        except (ValueError, ImportError) as error:
            raise UnknownEnvironment(name, str(error)) from error
        self._players, self._random = players, random.Random(0).getstate()

    def reset(self, seed: int) -> Observation:
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._game.reset(num_players=self._players, seed=seed)
            player, seen = self._game.get_observation()
        return Observation(text=_text(seen), fields={"player": player})

    def step(self, action: Action) -> Observation:
        with self._own_random():
            done, _ = self._game.step(action=action.text)
            if done:
                rewards, _ = self._game.close()
                given = {str(player): float(reward) for player, reward in (rewards or {}).items()}
                return Observation(fields={"rewards": given}, reward=given.get("0", 0.0), done=True)
            player, seen = self._game.get_observation()
        return Observation(text=_text(seen), fields={"player": player}, reward=0.0)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with _global_random:
            outer = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outer)


def _text(seen: object) -> str:
    """An observation is a text in wrapped games, and a list of messages in raw ones."""
    if isinstance(seen, str):
        return seen
    return "\n".join(str(message[1]) for message in seen) if isinstance(seen, list) else str(seen)
