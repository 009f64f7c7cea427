"""The sliding-tile game 2048, as a text and as a board.

holdfast rl environment serve "python:examples/rl/game_2048.py:Game2048Environment?goal=64"
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.errors import UnknownEnvironment

Move = Literal["up", "down", "left", "right"]
MOVES: tuple[Move, ...] = get_args(Move)
Board = tuple[tuple[int, ...], ...]
"""Rows of tiles: powers of two, and 0 where there is none."""

_WORD = re.compile("|".join(MOVES))


class Game2048Environment(Environment):
    """Slides tiles until none can move, or one is `goal`. The reward of a step is the value of merged tiles / `goal`.

    The move is the last of the words up, down, left, right in the text, or the field `move`. One that changes nothing
    is told so, and leaves the board as it is.
    """

    def __init__(self, size: int = 4, goal: int = 2048) -> None:
        if not 2 <= size <= 16 or goal < 4 or goal & (goal - 1):
            raise UnknownEnvironment("2048", f"size={size} must be in 2 to 16, goal={goal} a power of two from 4 on")
        self._size, self._goal = size, goal
        self._random, self._score = random.Random(0), 0
        self._board: Board = ()

    def reset(self, seed: int) -> Observation:
        self._random, self._score = random.Random(seed), 0
        empty: Board = ((0,) * self._size,) * self._size
        self._board = add_tile(add_tile(empty, self._random), self._random)
        return self._observe("", None)

    def step(self, action: Action) -> Observation:
        move = _move(action)
        if move is None:
            return self._observe("no move: write up, down, left or right\n", 0.0)
        board, gained = slide(self._board, move)
        if board == self._board:
            return self._observe(f"nothing moves {move}\n", 0.0)
        self._board, self._score = add_tile(board, self._random), self._score + gained
        return self._observe("", gained / self._goal)

    def state(self) -> Mapping[str, Any]:
        return {"score": self._score, "board": self._board}

    def _observe(self, said: str, reward: float | None) -> Observation:
        moves = possible_moves(self._board)
        done = not moves or max(map(max, self._board)) >= self._goal
        fields = {"board": [list(row) for row in self._board], "moves": moves, "score": self._score}
        return Observation(text=said + render(self._board), fields=fields, reward=reward, done=done)


def slide(board: Board, move: Move) -> tuple[Board, int]:
    """The board after a move, before a new tile, and the sum of the tiles that were merged."""
    lines = board if move in ("left", "right") else tuple(zip(*board, strict=True))
    backwards = move in ("right", "down")
    merged = [_merge(line[::-1] if backwards else line) for line in lines]
    moved = tuple(line[::-1] if backwards else line for line, _ in merged)
    gained = sum(points for _, points in merged)
    return (moved if move in ("left", "right") else tuple(zip(*moved, strict=True))), gained


def possible_moves(board: Board) -> list[Move]:
    """The moves that change the board."""
    return [move for move in MOVES if slide(board, move)[0] != board]


def add_tile(board: Board, numbers: random.Random) -> Board:
    """The board with a new tile in an empty cell: 2, or one time in ten 4."""
    empty = [(row, column) for row, line in enumerate(board) for column, tile in enumerate(line) if not tile]
    if not empty:
        return board
    where, tile = numbers.choice(empty), 4 if numbers.random() < 0.1 else 2
    return tuple(
        tuple(tile if (row, column) == where else old for column, old in enumerate(line))
        for row, line in enumerate(board)
    )


def render(board: Board) -> str:
    """The board as text: a line for each row, a dot for an empty cell."""
    width = max(len(str(tile)) for line in board for tile in line)
    return "\n".join(" ".join((str(tile) if tile else ".").rjust(width) for tile in line) for line in board)


def _merge(line: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Slide a line to its start. A tile merges once, with the first equal neighbour."""
    merged, gained, open_for_merge = list[int](), 0, False
    for tile in filter(None, line):
        if open_for_merge and merged[-1] == tile:
            merged[-1], open_for_merge = 2 * tile, False
            gained += 2 * tile
        else:
            merged.append(tile)
            open_for_merge = True
    return (*merged, *[0] * (len(line) - len(merged))), gained


def _move(action: Action) -> Move | None:
    words = [action.fields.get("move"), *reversed(_WORD.findall(action.text.lower()))]
    return next((move for word in words for move in MOVES if word == move), None)
