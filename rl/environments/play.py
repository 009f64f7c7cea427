"""Play episodes of several turns, alone or in groups, as the tokens that a trainer learns from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.comms.errors import describe
from holdfast.ft.console.units import counted
from holdfast.rl.config.run_config import EnvironmentConfig, RunConfig
from holdfast.rl.data.episode import Completion, Episode, EpisodeFinish, Group, Prompt, is_usable_reward
from holdfast.rl.data.prompts import Tokenizer, seed_of
from holdfast.rl.data.replay_buffer import FailedGroup
from holdfast.rl.environments.environment import Observation
from holdfast.rl.environments.session import EnvironmentSession
from holdfast.rl.errors import (
    EnvironmentBusy,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentHung,
    EnvironmentLied,
    UnknownEnvironment,
)

if TYPE_CHECKING:
    from holdfast.rl.environments.client import EnvironmentPool

Act = Callable[[tuple[int, ...]], Awaitable[Completion]]
"""The policy: from all tokens of the episode so far to the tokens of its next turn."""


class TextCodec(Protocol):
    """How texts become tokens and tokens texts: a tokenizer, with whatever a chat template puts around a turn."""

    def encode(self, text: str, turn: int) -> Sequence[int]:
        """The tokens of an observation. Turn 0 is the prompt; the policy goes on right behind them."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of what the policy drew; a stop token at the end is left out before."""


class EpisodePlay:
    """An episode while it is played: `act` takes what the policy drew after `seen`, until there is a `result`.

    What the environment does wrong is the result, not raised, also a first observation that is over, empty or too long,
    and a text that the codec cannot encode. Errors of decoding what the policy drew are raised. `number` is that of the
    episode's prompt, which is what the environment shows first.

    An environment that died, hangs or is busy is tried again, `attempts` times in all: another one is brought to the
    same place by the same seed and actions, so that no token is drawn again. `on_retry` is called with each failure
    before. Only a session of a source can be tried again.
    """

    def __init__(
        self,
        session: EnvironmentSession,
        codec: TextCodec,
        *,
        number: int,
        seed: int,
        max_turns: int,
        max_tokens: int | None = None,
        attempts: int = 1,
        on_retry: Callable[[EnvironmentFailed], None] = lambda failure: None,
    ) -> None:
        self.seen: tuple[int, ...] = ()
        self.result: Episode | EnvironmentFailed | None = None
        self._session, self._codec, self._on_retry = session, codec, on_retry
        self._number, self._seed = number, seed
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._left = attempts
        self._first = Observation()
        self._begun = 0
        """The tokens of the prompt, which `seen` begins with."""
        self._turns = list[tuple[str, Observation]]()
        """Each action, and the environment's answer."""
        self._logprobs, self._versions, self._mask = list[float](), list[int](), list[bool]()
        """Those of the tokens after the prompt; 0 for tokens of the environment."""
        self._cut = False

    async def begin(self) -> None:
        """Begin the episode: the prompt is what the environment shows first."""
        try:
            self._first = first = await self._observed(None)
            self.seen = self._encode(first.text)
            self._begun = len(self.seen)
            if first.done or not self.seen:
                raise self._lied("the episode is over at once" if first.done else "no first observation")
            if self._max_tokens is not None and len(self.seen) >= self._max_tokens:
                raise self._lied(
                    f"its first observation is {counted(len(self.seen), 'token')} long: no room for a turn"
                )
        except EnvironmentFailed as error:
            self.result = error

    async def act(self, completion: Completion) -> None:
        """Take a turn of the policy, and the environment's answer to it."""
        drawn = completion.tokens
        action = self._codec.decode(drawn[:-1] if completion.finish == "stop" else drawn)
        try:
            observation = await self._observed(action)
            self._turns.append((action, observation))
            self._add(drawn, completion.logprobs, completion.versions, mine=True)
            self._cut |= completion.finish == "length"
            if observation.done:
                return self._end("stop")
            answer = self._encode(observation.text)
            self._add(answer, [0.0] * len(answer), [0] * len(answer), mine=False)
            too_long = self._max_tokens is not None and len(self.seen) >= self._max_tokens
            if too_long or len(self._turns) >= self._max_turns:
                self._end("turns")
        except EnvironmentFailed as error:
            self.result = error

    def _add(self, tokens: tuple[int, ...], logprobs: Sequence[float], versions: Sequence[int], *, mine: bool) -> None:
        self.seen += tokens
        self._logprobs += logprobs
        self._versions += versions
        self._mask += [mine] * len(tokens)

    async def _observed(self, action: str | None) -> Observation:
        """What the environment shows after an action, or at first. Raises EnvironmentFailed."""
        again = False
        while True:
            try:
                if again:
                    await self._replay()
                return await (self._session.reset(self._seed) if action is None else self._session.step(action))
            except (EnvironmentDied, EnvironmentHung, EnvironmentBusy) as error:
                self._left -= 1
                if self._left <= 0:
                    raise
                self._on_retry(error)
                again = action is not None

    async def _replay(self) -> None:
        """Bring another environment to where the one before was. Raises EnvironmentFailed."""
        same = await self._session.reset(self._seed) == self._first
        for action, answer in self._turns:
            same = same and await self._session.step(action) == answer
        if not same:
            raise self._lied("its answers to the same seed and actions were others before: more than these decides")

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self._codec.encode(text, len(self._turns)))
        except Exception as error:
            raise self._lied(f"no tokens for its text: {describe(error)}") from error

    def _lied(self, why: str) -> EnvironmentLied:
        return EnvironmentLied(self._session.environment, "step" if self._turns else "reset", why)

    def _end(self, finish: EpisodeFinish) -> None:
        reward = float(sum(answer.reward or 0.0 for _, answer in self._turns))
        if not is_usable_reward(reward):
            raise self._lied(f"the rewards add up to {reward}")
        self.result = Episode(
            prompt=Prompt(number=self._number, tokens=self.seen[: self._begun], text=self._first.text),
            tokens=self.seen[self._begun :],
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            mask=tuple(self._mask),
            reward=reward,
            finish="length" if self._cut else finish,
            turns=len(self._turns),
        )


async def play(
    session: EnvironmentSession,
    act: Act,
    codec: TextCodec,
    *,
    seed: int,
    max_turns: int,
    max_tokens: int | None = None,
    number: int = 0,
) -> Episode | EnvironmentFailed:
    """Play one episode: at most `max_turns`, and about `max_tokens` with the prompt (the last turn may exceed them).

    Errors of the policy are raised. See `EpisodePlay`.
    """
    playing = EpisodePlay(session, codec, number=number, seed=seed, max_turns=max_turns, max_tokens=max_tokens)
    await playing.begin()
    while playing.result is None:
        await playing.act(await act(playing.seen))
    return playing.result


class LineCodec:
    """Each observation is a line of its own; `beside_prompts` the first is encoded as prompts are.

    So a policy that learns from prompts too sees both alike.
    """

    def __init__(self, tokenizer: Tokenizer, *, beside_prompts: bool) -> None:
        self._tokenizer, self._beside_prompts = tokenizer, beside_prompts

    def encode(self, text: str, turn: int) -> Sequence[int]:
        """The tokens of an observation."""
        end = "" if self._beside_prompts and turn == 0 else "\n"
        return self._tokenizer.encode(f"\n{text}{end}" if turn else text + end)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of what the policy drew."""
        return self._tokenizer.decode(tokens)


class EpisodeFailure(msgspec.Struct, frozen=True):
    """An environment failed in an episode of group `number`; with `again`, another one goes on with it."""

    number: int
    reason: str
    again: bool


OnFailure = Callable[[EpisodeFailure], None]
OnResult = Callable[[Group | FailedGroup], None]


class GameInPlay:
    """Episodes that are played turn by turn together, so that each turn is one request to the policy."""

    def __init__(
        self,
        number: int,
        plays: Sequence[EpisodePlay],
        on_failure: OnFailure,
        on_result: OnResult,
    ) -> None:
        self._number, self._plays = number, plays
        self._on_failure, self._on_result = on_failure, on_result

    @property
    def waiting(self) -> dict[int, tuple[int, ...]]:
        """All tokens so far of each episode that is not over, by its place."""
        return {place: each.seen for place, each in enumerate(self._plays) if each.result is None}

    async def act(self, completions: Sequence[Completion]) -> None:
        """Take a turn of the policy in each episode of `waiting`, in that order."""
        going = [each for each in self._plays if each.result is None]
        await asyncio.gather(*(each.act(drawn) for each, drawn in zip(going, completions, strict=True)))

    def episodes(self) -> list[Episode]:
        """The episodes that did not fail, and in which the policy drew a token."""
        found = []
        for each in self._plays:
            if isinstance(each.result, EnvironmentFailed):
                self._on_failure(EpisodeFailure(self._number, str(each.result), again=False))
            elif each.result is not None and any(each.result.mask):
                found.append(each.result)
        return found

    def result(self) -> Group | FailedGroup:
        """The group of these episodes; failed if fewer than two are left that begin alike."""
        episodes = self.episodes()
        alike = tuple(each for each in episodes if each.prompt == episodes[0].prompt)
        for _ in range(len(episodes) - len(alike)):
            reason = "it does not begin as the group does: more than the seed decides"
            self._on_failure(EpisodeFailure(self._number, reason, again=False))
        group: Group | FailedGroup
        if len(alike) < 2:
            failed = tuple(str(each.result) for each in self._plays if isinstance(each.result, EnvironmentFailed))
            group = FailedGroup(number=self._number, reasons=failed or ("the policy drew no token",))
        else:
            group = Group(number=self._number, prompt=alike[0].prompt, episodes=alike)
        self._on_result(group)
        return group


class EnvironmentGames:
    """The groups of a run, each from the seed of its number; `limit` is that of an episode's tokens.

    `on_failure` is called with each failure of an environment, `on_result` with each group that is over.
    """

    def __init__(
        self,
        source: EnvironmentPool,
        codec: TextCodec,
        config: RunConfig,
        limit: int,
        on_failure: OnFailure,
        on_result: OnResult = lambda group: None,
    ) -> None:
        self._source, self._codec, self._on_failure, self._on_result = source, codec, on_failure, on_result
        self._environment, self._group, self._seed = config.environment, config.sampling.group, config.seed
        self._room = limit - config.sampling.max_new_tokens + 1
        # Whole groups at a time: parts of several could wait for each other.
        self._places = asyncio.Semaphore(places(config.environment) // self._group)

    async def check(self) -> None:
        """Begin the first episode, and leave it. Raises `UnknownEnvironment` if it cannot be begun."""
        async with self._source.session() as session:
            play = self._play(0, session, self._seed_of(0))
            await play.begin()
        if isinstance(play.result, EnvironmentFailed):
            raise UnknownEnvironment(self._source.environment, str(play.result))

    @asynccontextmanager
    async def begin(self, number: int) -> AsyncIterator[GameInPlay]:
        """Play the group of a number."""
        async with self._playing(number, [self._seed_of(number)] * self._group) as game:
            yield game

    @asynccontextmanager
    async def held_out(self, first: int, count: int) -> AsyncIterator[GameInPlay]:
        """Play episodes that no group has."""
        seeds = [seed_of("held-out episode", self._seed, first + each) for each in range(count)]
        async with self._playing(first, seeds) as game:
            yield game

    @asynccontextmanager
    async def _playing(self, number: int, seeds: Sequence[int]) -> AsyncIterator[GameInPlay]:
        async with self._places:
            sessions = [self._source.session() for _ in seeds]
            try:
                plays = [self._play(number, *each) for each in zip(sessions, seeds, strict=True)]
                await asyncio.gather(*(each.begin() for each in plays))
                yield GameInPlay(number, plays, self._on_failure, self._on_result)
            finally:
                await asyncio.gather(*(each.close() for each in sessions))

    def _play(self, number: int, session: EnvironmentSession, seed: int) -> EpisodePlay:
        return EpisodePlay(
            session,
            self._codec,
            number=number,
            seed=seed,
            max_turns=self._environment.max_turns,
            max_tokens=self._room,
            attempts=self._environment.attempts,
            on_retry=lambda error: self._on_failure(EpisodeFailure(number, str(error), again=True)),
        )

    def _seed_of(self, number: int) -> int:
        return seed_of("episode", self._seed, number)


def places(config: EnvironmentConfig) -> int:
    """How many episodes can be played at the same time."""
    return config.sessions * (config.servers or len(config.addresses) or 1)
