"""The environments that are shipped keep their rules, and `play` makes episodes of any, or a failed one of a fault."""

from __future__ import annotations

import itertools
import random
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rl.config.named_code import load_code
from holdfast.rl.data.episode import Completion, Episode, Finish
from holdfast.rl.data.prompts import arithmetic_held_out, arithmetic_training
from holdfast.rl.environments.builtin import ArithmeticEnvironment, GuessNumberEnvironment
from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.environments.local import LocalSession
from holdfast.rl.environments.play import Act, play
from holdfast.rl.environments.registry import check_environment, environment_factory, names, register
from holdfast.rl.errors import EnvironmentDied, EnvironmentFailed, EnvironmentLied, UnknownEnvironment
from holdfast.rl.grpo.batch import BatchColumns, counted_tokens
from support.event_loop import run
from support.programs.forked_programs import said
from support.rl.environment_servers import Misbehaving
from support.rl.small_batches import completion, group_of, objective
from support.source_tree import ROOT

EXAMPLES = f"python:{ROOT / 'examples' / 'rl'}"
GAME_2048 = f"{EXAMPLES}/game_2048.py:Game2048Environment"
example: Any = sys.modules[load_code(GAME_2048.removeprefix("python:")).__module__]
MOVES, add_tile, possible_moves, slide = example.MOVES, example.add_tile, example.possible_moves, example.slide

TILES = st.sampled_from([0, 0, 2, 4, 8, 16])
BOARDS = st.integers(2, 5).flatmap(
    lambda size: st.lists(st.lists(TILES, min_size=size, max_size=size).map(tuple), min_size=size, max_size=size).map(
        tuple
    )
)
TEXT = st.text(max_size=30)


def turned(board: Any) -> Any:
    """The board turned by a quarter, clockwise."""
    return tuple(zip(*board[::-1], strict=True))


@given(BOARDS)
def test_2048_a_row_slides_without_gaps_merges_each_tile_once_and_pays_what_it_merges(board: Any) -> None:
    """To the left; the other moves are the same on a board that is turned."""
    rows, paid = [], 0
    for row in board:
        tiles, merged = [tile for tile in row if tile], list[int]()
        while tiles:
            merged.append(tiles.pop(0))
            if tiles and tiles[0] == merged[-1]:
                merged[-1] += tiles.pop(0)
                paid += merged[-1]
        rows.append((*merged, *[0] * (len(row) - len(merged))))
    assert slide(board, "left") == (tuple(rows), paid)
    before, after = board, tuple(rows)
    for move in ("up", "right", "down"):
        before, after = turned(before), turned(after)
        assert slide(before, move) == (after, paid)  # type: ignore[arg-type]


@given(BOARDS, st.randoms(use_true_random=False))
def test_2048_a_new_tile_fills_one_empty_cell_and_a_full_board_without_equal_neighbours_is_the_end(
    board: Any, numbers: random.Random
) -> None:
    cells = zip(itertools.chain(*board), itertools.chain(*add_tile(board, numbers)), strict=True)
    changed = [(old, new) for old, new in cells if old != new]
    assert changed == [] if all(map(all, board)) else changed in ([(0, 2)], [(0, 4)])
    lines = [*board, *zip(*board, strict=True)]
    stuck = all(map(all, board)) and not any(a == b for line in lines for a, b in pairwise(line))
    empty = not any(map(any, board))
    assert (possible_moves(board) == []) == (stuck or empty)


@given(st.integers(0, 2**40), st.lists(st.sampled_from(MOVES), max_size=60))
def test_2048_score_and_rewards_agree(seed: int, moves: list[str]) -> None:
    game = example.Game2048Environment(goal=64)
    observation, rewards = game.reset(seed), 0.0
    for move in moves:
        if observation.done:
            break
        before = observation.fields["board"]
        observation = game.step(Action(f"I go {move}"))
        rewards += observation.reward or 0.0
        if observation.fields["board"] == before:
            assert observation.reward == 0.0
            assert observation.text.startswith("nothing moves")
    assert rewards == pytest.approx(observation.fields["score"] / 64)
    highest = max(map(max, observation.fields["board"]))
    assert observation.done == (highest >= 64 or not observation.fields["moves"])


def test_2048_takes_the_last_word_and_says_what_it_cannot_read() -> None:
    game = example.Game2048Environment()
    game.reset(0)
    assert game.step(Action("sideways")).text.startswith("no move: write up, down, left or right\n")
    boards = []
    for action in (Action("not left, but UP"), Action(fields={"move": "up"})):
        game.reset(5)
        boards.append(game.step(action).fields["board"])
    assert boards[0] == boards[1]
    assert example.render(((2, 0), (16, 4))) == " 2  .\n16  4"


@given(st.integers(0, 2**40))
def test_arithmetic_with_a_split_asks_the_problems_of_the_task_and_no_others(seed: int) -> None:
    for split, problems in (("train", arithmetic_training()), ("held_out", arithmetic_held_out())):
        environment = ArithmeticEnvironment(split=split)  # type: ignore[arg-type]
        question = environment.reset(seed).text
        answer = {each.prompt: each.answer for each in problems}[question]
        for text, reward in ((f" {answer} ", 1.0), (f"{answer}0", 0.0), (str(int(answer) + 100), 0.0)):
            assert environment.reset(seed).text == question
            observation = environment.step(Action(text))
            assert (observation.reward, observation.done) == (reward, True)
    with pytest.raises(UnknownEnvironment, match="leave terms and digits"):
        ArithmeticEnvironment(digits=2, split="train")


@given(st.integers(0, 2**40), TEXT)
def test_arithmetic_pays_the_right_sum_alone(seed: int, text: str) -> None:
    environment = ArithmeticEnvironment(terms=4, digits=2)
    question = environment.reset(seed)
    answer = sum(map(int, question.text.removesuffix("=").split("+")))
    assert environment.step(Action(f" {answer} is it")).reward == 1.0
    environment.reset(seed)
    observation = environment.step(Action(text))
    assert observation.done
    assert (observation.reward == 1.0) == (text.strip().startswith(str(answer)) and observation.text == "right")


@given(st.integers(0, 2**40), st.lists(TEXT | st.integers(-5, 105).map(str), max_size=8))
def test_guess_hints_lead_to_the_number_and_turns_run_out(seed: int, guesses: list[str]) -> None:
    environment = GuessNumberEnvironment(high=100, turns=7)
    low, high, left = 1, 100, 7
    observation = environment.reset(seed)
    for text in guesses:
        if observation.done:
            break
        left -= 1
        observation = environment.step(Action(text))
        assert observation.fields == {"turns_left": left}
        assert observation.done == (left == 0 or observation.text == "right")
        if text.lstrip("-").isascii() and text.lstrip("-").isdigit():
            low = max(low, int(text) + 1) if observation.text == "higher" else low
            high = min(high, int(text) - 1) if observation.text == "lower" else high
        assert low <= high


GYMNASIUM = f"{EXAMPLES}/gymnasium_environment.py:GymnasiumEnvironment?name="
TEXTARENA = f"{EXAMPLES}/textarena_game.py:TextArenaEnvironment?name="
NAMES = [
    *("arithmetic", "arithmetic?terms=5&digits=3", "guess", "guess?high=1000&turns=12"),
    f"{GAME_2048}?size=3&goal=32",
    *(GYMNASIUM + each for each in ("CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Pendulum-v1")),
    *(TEXTARENA + each for each in ("GuessTheNumber-v0", "TicTacToe-v0&players=2", "GuessTheNumber-v0-raw")),
]


def skip_unless_installed(name: str) -> None:
    """Skip if the environment of an example needs a package that is not here."""
    for package, prefix in (("gymnasium", GYMNASIUM), ("textarena", TEXTARENA)):
        if name.startswith(prefix):
            pytest.importorskip(package, reason=f"pip install 'holdfast[{package}]'")


def played(name: str, seed: int, *, disturbed: bool) -> list[Observation]:
    """An episode of random actions, beside another one of the same environment if `disturbed`."""
    environment, other = environment_factory(name)(), environment_factory(name)()
    seen = [environment.reset(seed)]
    if disturbed:
        other.reset(seed + 1)
        random.random()
    numbers = random.Random(seed)
    while not seen[-1].done and len(seen) < 13:
        seen.append(environment.step(Action(f"[{numbers.randint(0, 8)}] {numbers.choice(MOVES)}")))
        if disturbed:
            other.reset(seed + 2)
    environment.close()
    other.close()
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_an_episode_is_a_function_of_seed_and_actions(name: str) -> None:
    skip_unless_installed(name)
    check_environment(name)
    for seed in range(3):
        assert played(name, seed, disturbed=False) == played(name, seed, disturbed=True)


def test_textarena_leaves_the_random_numbers_of_the_program_alone() -> None:
    skip_unless_installed(TEXTARENA)
    random.seed(1)
    expected = random.random()
    random.seed(1)
    played(f"{TEXTARENA}GuessTheNumber-v0", 3, disturbed=False)
    assert random.random() == expected


def test_textarena_gives_both_players_their_reward() -> None:
    skip_unless_installed(TEXTARENA)
    game = environment_factory(f"{TEXTARENA}TicTacToe-v0&players=2")()
    observation = game.reset(0)
    for cell in (4, 0, 1, 3, 7):
        observation = game.step(Action(f"[{cell}]"))
    assert observation.done
    assert observation.reward == 1.0
    assert observation.fields["rewards"] == {"0": 1.0, "1": -1.0}


@given(TEXT | st.sampled_from(["[1]", "[[1, 2]]", "{}", "1e999", "[NaN]", "-1", "99999999999999999999", "[0.5]"]))
def test_gymnasium_takes_any_text(text: str) -> None:
    skip_unless_installed(GYMNASIUM)
    for name in ("CartPole-v1", "Pendulum-v1"):
        environment = environment_factory(GYMNASIUM + name)()
        environment.reset(0)
        observation = environment.step(Action(text))
        assert isinstance(observation.reward, float)
        environment.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "there are arithmetic, guess"),
        ("guess?low=3", "there is no option 'low'; there are: high, turns"),
        ("guess?high=many", "Expected `int`"),
        ("guess?high=0", "must be positive"),
        ("guess:what:ever", "there are arithmetic, guess"),
        (f"{GAME_2048}?goal=100", "a power of two"),
        (f"{EXAMPLES}/coder.py:CoderEnvironment?tests=0", "tests=0 must be in 1 to 100"),
        ("arithmetic?terms=1", "must be in 2 to 100"),
        (GYMNASIUM.partition("?")[0], "name"),
        (f"{GYMNASIUM}NoSuch-v1", "NoSuch"),
        (f"{TEXTARENA}NoSuch-v0", "NoSuch"),
    ],
)
def test_a_name_that_is_no_environment_is_refused_before_anything_starts(name: str, why: str) -> None:
    skip_unless_installed(name)
    with pytest.raises(UnknownEnvironment, match=why):
        check_environment(name)


FAULTY = """
class Faulty:
    def __init__(self, when: str):
        self.when = when
        self.fail("made")

    def fail(self, when):
        if when == self.when:
            raise RuntimeError("no license file")

    def reset(self, seed):
        self.fail("reset")
        from holdfast.rl.environments.environment import Observation
        return Observation(text="")

    def close(self):
        self.fail("closed")
        if self.when != "closed":
            raise RuntimeError("it was never open")

class Quits:
    def __init__(self):
        raise SystemExit("no license file")

def unreadable(size: "NoSuchType"): ...
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Faulty?when=made", r"it cannot be made: RuntimeError: no license file \(faulty\.py:9\)"),
        ("Faulty?when=reset", r"it cannot begin an episode: RuntimeError: no license file \(faulty\.py:9\)"),
        ("Faulty?when=closed", r"it cannot be closed: RuntimeError: no license file \(faulty\.py:9\)"),
        ("Quits", r"it cannot be made: SystemExit: no license file"),
        ("unreadable", r"its parameters cannot be read: NameError: name 'NoSuchType' is not defined"),
    ],
)
def test_an_environment_that_raises_before_an_episode_is_refused_with_the_reason_and_the_line(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    with pytest.raises(UnknownEnvironment, match=why):
        check_environment(f"python:{tmp_path}/faulty.py:{name}")


SERVE = ("rl", "environment", "serve", "guess")


def test_a_server_that_cannot_listen_says_where_and_what_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        tried = {f"127.0.0.1 --port {port}": said(*SERVE, "--port", port)}
    for host in ("192.0.2.1", "no..name"):  # an address of no host, and what can be the name of none
        tried[f"{host} --port 0"] = said(*SERVE, "--host", host)
    for where, refused in tried.items():
        assert refused.exit_code == 2, refused.output
        assert f"holdfast rl environment serve: cannot listen on --host {where}: " in refused.output
        assert "choose another" in refused.output and "Traceback" not in refused.output


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    copy = shutil.copy(ROOT / "examples" / "rl" / "textarena_game.py", tmp_path)
    with pytest.raises(UnknownEnvironment, match="import of textarena"):
        environment_factory(f"python:{copy}:TextArenaEnvironment?name=GuessTheNumber-v0")


def test_environments_can_be_registered() -> None:
    register("sums", ArithmeticEnvironment)
    assert "sums" in names()
    assert environment_factory("sums?terms=2")().reset(0).text.count("+") == 1
    with pytest.raises(UnknownEnvironment, match="no colon"):
        register("a:b", ArithmeticEnvironment)


CHARACTERS: Any = SimpleNamespace(
    encode=lambda text, turn: tuple(f"{text}\n".encode()), decode=lambda tokens: bytes(tokens).decode().strip()
)
"""A token for each byte; a line for each turn."""


def line(text: str, version: int = 1, finish: Finish = "stop") -> Completion:
    return completion(f"{text}\n".encode(), version, finish)


def saying(*texts: str) -> Act:
    """A policy that says these texts, one after another, under versions 1, 2 ..."""
    said = iter(enumerate(texts, 1))

    async def act(tokens: tuple[int, ...]) -> Completion:
        version, text = next(said)
        return line(text, version)

    return act


async def bisect(tokens: tuple[int, ...]) -> Completion:
    """A policy that reads all hints so far, and guesses in the middle."""
    low, high = 1, 100
    lines = bytes(tokens).decode().splitlines()[1:]
    for guess, hint in zip(lines[::2], lines[1::2], strict=True):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return line(str((low + high) // 2))


def record_of(
    factory: Callable[[], Environment], act: Act, *, seed: int = 0, max_turns: int = 10, max_tokens: int | None = None
) -> Episode | EnvironmentFailed:
    async def body() -> Episode | EnvironmentFailed:
        async with LocalSession(factory, "test", timeout=0.5) as session:
            return await play(session, act, CHARACTERS, seed=seed, max_turns=max_turns, max_tokens=max_tokens)

    return run(body())


def whole(result: Episode | EnvironmentFailed) -> Episode:
    assert isinstance(result, Episode), result
    return result


@given(st.integers(0, 2**31))
def test_an_episode_masks_what_the_policy_drew(seed: int) -> None:
    episode = whole(record_of(GuessNumberEnvironment, bisect, seed=seed))
    assert (episode.reward, episode.finish) == (1.0, "stop")
    assert episode.prompt.tokens == tuple(f"{episode.prompt.text}\n".encode())
    drawn = bytes(token for token, mine in zip(episode.tokens, episode.mask, strict=True) if mine).decode()
    heard = bytes(token for token, mine in zip(episode.tokens, episode.mask, strict=True) if not mine).decode()
    assert all(each.isdigit() for each in drawn.split()) and len(drawn.split()) == episode.turns
    assert set(heard.split()) <= {"higher", "lower"}
    assert len(heard.split()) == episode.turns - 1, "the last answer is not for the policy"


def test_logprobs_and_versions_are_those_of_the_tokens() -> None:
    episode = whole(record_of(Misbehaving, saying("a", "end")))
    assert bytes(episode.tokens) == b"a\n1\nend\n"
    assert episode.mask == (True, True, False, False, True, True, True, True)
    assert episode.versions == (1, 1, 0, 0, 2, 2, 2, 2)
    assert episode.logprobs == (-0.5, -0.5, 0.0, 0.0, -0.5, -0.5, -0.5, -0.5)
    assert episode.reward == 1.5


def test_an_episode_without_an_end_ends_at_the_limit_of_turns_or_tokens() -> None:
    for limits, turns in (({"max_turns": 4}, 4), ({"max_tokens": 8}, 2)):
        result = whole(record_of(Misbehaving, saying(*["go"] * 9), **limits))
        assert (result.finish, result.turns, result.reward) == ("turns", turns, 0.5 * turns)


@pytest.mark.parametrize("cut", [None, 0, 1])
@pytest.mark.parametrize("ends", [False, True])
def test_dapo_leaves_out_an_episode_with_a_completion_that_was_cut_and_no_other(cut: int | None, ends: bool) -> None:
    """Neither the limit of turns nor the end that the environment makes decides that."""
    said = iter(enumerate(("go", "end" if ends else "go")))

    async def act(tokens: tuple[int, ...]) -> Completion:
        turn, text = next(said)
        return line(text, finish="length" if turn == cut else "stop")

    result = whole(record_of(Misbehaving, act, max_turns=2))
    mask = counted_tokens(BatchColumns.of([group_of(result)]), objective("dapo"))
    assert int(mask.sum()) == (0 if cut is not None else sum(result.mask))


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
    result = record_of(lambda: Scripted(*observations), saying("a", "b", "c"), max_turns=3)
    assert isinstance(result, EnvironmentLied)
    assert why in result.why


@given(st.lists(st.tuples(st.floats() | st.none(), st.booleans(), st.text(max_size=4)), min_size=1, max_size=6))
def test_whatever_an_environment_returns_an_episode_or_its_failure_is_the_result(
    script: list[tuple[float | None, bool, str]],
) -> None:
    observations = [Observation(text=text, reward=reward, done=done) for reward, done, text in script]
    result = record_of(lambda: Scripted(*observations), saying(*["go"] * 9))
    if isinstance(result, Episode):
        assert result.mask.count(True) == 3 * result.turns


def test_a_fault_of_the_environment_is_a_failed_episode_and_an_error_of_the_policy_is_raised() -> None:
    failed = record_of(Misbehaving, saying("go", "raise"))
    assert isinstance(failed, EnvironmentDied)
    assert (failed.call, failed.environment) == ("step", "test")

    def act(tokens: tuple[int, ...]) -> Awaitable[Completion]:
        raise ConnectionError("no generator")

    with pytest.raises(ConnectionError, match="no generator"):
        record_of(Misbehaving, act)
