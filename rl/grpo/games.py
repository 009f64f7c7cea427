"""Groups of episodes that a policy plays in the environment of a run, with its texts as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from holdfast.rl.config.run_config import EnvironmentConfig, RunConfig
from holdfast.rl.data.episode import Completion, Episode, Group, Prompt
from holdfast.rl.data.prompts import Tokenizer, seed_of
from holdfast.rl.data.replay_buffer import FailedGroup
from holdfast.rl.environments.errors import UnknownEnvironment
from holdfast.rl.environments.play import EpisodePlay, FailedEpisode, TextCodec
from holdfast.rl.environments.session import EnvironmentSession
from holdfast.rl.environments.session_source import SessionSource


class LineCodec:
    """Each observation is a line of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, turn: int) -> Sequence[int]:
        """The tokens of an observation."""
        return self._tokenizer.encode(f"\n{text}\n" if turn else f"{text}\n")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of what the policy drew."""
        return self._tokenizer.decode(tokens)


class PromptCodec(LineCodec):
    """The first observation is encoded as a prompt is, for a policy that learns from prompts too."""

    def encode(self, text: str, turn: int) -> Sequence[int]:
        """The tokens of an observation."""
        return super().encode(text, turn) if turn else self._tokenizer.encode(text)


def codec_of(tokenizer: Tokenizer, *, beside_prompts: bool) -> TextCodec:
    """The codec for a policy's tokenizer; `beside_prompts`: other groups of the run are prompts."""
    return PromptCodec(tokenizer) if beside_prompts else LineCodec(tokenizer)


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
        return {place: each.seen for place, each in enumerate(self._plays) if not each.over}

    async def act(self, completions: Sequence[Completion]) -> None:
        """Take a turn of the policy in each episode of `waiting`, in that order."""
        going = [each for each in self._plays if not each.over]
        await asyncio.gather(*(each.act(drawn) for each, drawn in zip(going, completions, strict=True)))

    def episodes(self) -> list[Episode]:
        """The episodes that did not fail, and in which the policy drew a token."""
        found = []
        for each in self._plays:
            if isinstance(each.result, FailedEpisode):
                self._on_failure(EpisodeFailure(self._number, each.result.why, again=False))
            elif each.result is not None and any(each.result.mask):
                played = each.result
                found.append(played.episode(Prompt(number=self._number, tokens=played.prompt, text=played.first.text)))
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
            failed = tuple(each.result.why for each in self._plays if isinstance(each.result, FailedEpisode))
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
        source: SessionSource,
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
        if isinstance(play.result, FailedEpisode):
            raise UnknownEnvironment(self._source.environment, play.result.why)

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
