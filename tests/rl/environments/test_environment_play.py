"""`play`: episodes are records to learn from, and what an environment does wrong is a failed episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rl.data.episode import Completion, Episode, Finish, Group
from holdfast.rl.environments.builtin import GuessNumberEnvironment
from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.environments.local import LocalSession
from holdfast.rl.environments.play import Act, play
from holdfast.rl.errors import EnvironmentDied, EnvironmentFailed, EnvironmentHung, EnvironmentLied
from holdfast.rl.grpo.batch import BatchColumns, counted_tokens
from support.rl.environment_servers import Misbehaving
from support.rl.event_loop import run
from support.rl.small_batches import objective


class Characters:
    """A token for each byte; a line for each turn."""

    def encode(self, text: str, turn: int) -> Sequence[int]:
        return tuple(f"{text}\n".encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode().strip()


def completion(text: str, version: int = 1, finish: Finish = "stop") -> Completion:
    tokens = tuple(f"{text}\n".encode())
    return Completion(tokens=tokens, logprobs=(-0.5,) * len(tokens), versions=(version,) * len(tokens), finish=finish)


def saying(*texts: str) -> Act:
    """A policy that says these texts, one after another, under versions 1, 2 ..."""
    said = iter(enumerate(texts, 1))

    async def act(tokens: tuple[int, ...]) -> Completion:
        version, text = next(said)
        return completion(text, version)

    return act


async def bisect(tokens: tuple[int, ...]) -> Completion:
    """A policy that reads all hints so far, and guesses in the middle."""
    low, high = 1, 100
    lines = bytes(tokens).decode().splitlines()[1:]
    for guess, hint in zip(lines[::2], lines[1::2], strict=True):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return completion(str((low + high) // 2))


def played(
    factory: Callable[[], Environment], act: Act, *, seed: int = 0, max_turns: int = 10, max_tokens: int | None = None
) -> Episode | EnvironmentFailed:
    async def body() -> Episode | EnvironmentFailed:
        async with LocalSession(factory, "test", timeout=0.5) as session:
            return await play(session, act, Characters(), seed=seed, max_turns=max_turns, max_tokens=max_tokens)

    return run(body())


def whole(result: Episode | EnvironmentFailed) -> Episode:
    assert isinstance(result, Episode), result
    return result


@given(st.integers(0, 2**31))
def test_an_episode_masks_what_the_policy_drew(seed: int) -> None:
    episode = whole(played(GuessNumberEnvironment, bisect, seed=seed))
    assert (episode.reward, episode.finish) == (1.0, "stop")
    assert episode.prompt.tokens == tuple(f"{episode.prompt.text}\n".encode())
    drawn = bytes(token for token, mine in zip(episode.tokens, episode.mask, strict=True) if mine).decode()
    heard = bytes(token for token, mine in zip(episode.tokens, episode.mask, strict=True) if not mine).decode()
    assert all(each.isdigit() for each in drawn.split()) and len(drawn.split()) == episode.turns
    assert set(heard.split()) <= {"higher", "lower"}
    assert len(heard.split()) == episode.turns - 1, "the last answer is not for the policy"


def test_logprobs_and_versions_are_those_of_the_tokens() -> None:
    episode = whole(played(Misbehaving, saying("a", "end")))
    assert bytes(episode.tokens) == b"a\n1\nend\n"
    assert episode.mask == (True, True, False, False, True, True, True, True)
    assert episode.versions == (1, 1, 0, 0, 2, 2, 2, 2)
    assert episode.logprobs == (-0.5, -0.5, 0.0, 0.0, -0.5, -0.5, -0.5, -0.5)
    assert episode.reward == 1.5


def test_an_episode_without_an_end_ends_at_the_limit_of_turns_or_tokens() -> None:
    for limits, turns in (({"max_turns": 4}, 4), ({"max_tokens": 8}, 2)):
        result = whole(played(Misbehaving, saying(*["go"] * 9), **limits))
        assert (result.finish, result.turns, result.reward) == ("turns", turns, 0.5 * turns)


@pytest.mark.parametrize("cut", [None, 0, 1])
@pytest.mark.parametrize("ends", [False, True])
def test_dapo_leaves_out_an_episode_with_a_completion_that_was_cut_and_no_other(cut: int | None, ends: bool) -> None:
    """Neither the limit of turns nor the end that the environment makes decides that."""
    said = iter(enumerate(("go", "end" if ends else "go")))

    async def act(tokens: tuple[int, ...]) -> Completion:
        turn, text = next(said)
        return completion(text, finish="length" if turn == cut else "stop")

    result = whole(played(Misbehaving, act, max_turns=2))
    group = Group(number=0, prompt=result.prompt, episodes=(result,))
    mask = counted_tokens(BatchColumns.of([group]), objective("dapo"))
    assert int(mask.sum()) == (0 if cut is not None else sum(result.mask))


@pytest.mark.parametrize(
    ("how", "kind"),
    [("raise", EnvironmentDied), ("hang", EnvironmentHung), ("nan", EnvironmentLied)],
)
def test_a_fault_is_a_failed_episode(how: str, kind: type[EnvironmentFailed]) -> None:
    Misbehaving.release.clear()
    result = played(Misbehaving, saying("go", how))
    Misbehaving.release.set()
    assert isinstance(result, kind)
    assert (result.call, result.environment) == ("step", "test")


class Scripted(Environment):
    """Gives these observations, one after another."""

    def __init__(self, *observations: Observation) -> None:
        self._rest = list(observations)

    def reset(self, seed: int) -> Observation:
        return self._rest.pop(0)

    def step(self, action: Action) -> Observation:
        return self._rest.pop(0)


@pytest.mark.parametrize(
    ("observations", "why"),
    [
        ([Observation(text="over", done=True)], "the episode is over at once"),
        ([Observation(text="\ud800")], "no tokens for its text: UnicodeEncodeError"),
        ([Observation(text="a"), Observation(text="\ud800", reward=1.0)], "no tokens for its text"),
        ([Observation(text="a"), *[Observation(text="b", reward=1e308)] * 3], "the rewards add up to inf"),
    ],
)
def test_what_cannot_be_learnt_from_is_a_failed_episode(observations: list[Observation], why: str) -> None:
    result = played(lambda: Scripted(*observations), saying("a", "b", "c"), max_turns=3)
    assert isinstance(result, EnvironmentLied)
    assert why in result.why


@given(st.lists(st.tuples(st.floats() | st.none(), st.booleans(), st.text(max_size=4)), min_size=1, max_size=6))
def test_whatever_an_environment_returns_an_episode_or_its_failure_is_the_result(
    script: list[tuple[float | None, bool, str]],
) -> None:
    observations = [Observation(text=text, reward=reward, done=done) for reward, done, text in script]
    result = played(lambda: Scripted(*observations), saying(*["go"] * 9))
    if isinstance(result, Episode):
        assert result.mask.count(True) == 3 * result.turns


def test_an_error_of_the_policy_is_raised_and_the_session_freed() -> None:
    def act(tokens: tuple[int, ...]) -> Awaitable[Completion]:
        raise ConnectionError("no generator")

    with pytest.raises(ConnectionError, match="no generator"):
        played(Misbehaving, act)
