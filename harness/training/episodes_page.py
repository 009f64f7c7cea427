"""Renders the episodes of a run as a page that a person can read: prompt, answer, reward, version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from holdfast.harness.report.render import environment
from holdfast.rl.data.episode import Episode, Group

TEMPLATE = "episodes.html.j2"

Decode = Callable[[tuple[int, ...]], str]


class EpisodeRow(msgspec.Struct, frozen=True):
    """An episode in words. `versions` are those of the first and the last token that the policy drew.

    `answer` is in pieces, each with whether the policy drew it: an environment said the others.
    """

    answer: tuple[tuple[str, bool], ...]
    reward: float
    parts: tuple[tuple[str, float], ...]
    versions: tuple[int, int]
    tokens: int
    turns: int
    finish: str


class GroupRows(msgspec.Struct, frozen=True):
    """The episodes of a prompt. `mean` is their mean reward."""

    number: int
    prompt: str
    reference: str
    mean: float
    episodes: tuple[EpisodeRow, ...]


def rows_of(groups: Iterable[Group], decode: Decode) -> list[GroupRows]:
    """Groups in words; `decode` turns tokens into text."""
    return [
        GroupRows(
            number=group.number,
            prompt=group.prompt.text or decode(group.prompt.tokens),
            reference=group.prompt.answer,
            mean=sum(each.reward for each in group.episodes) / max(1, len(group.episodes)),
            episodes=tuple(_row(each, decode) for each in group.episodes),
        )
        for group in groups
    ]


def render(title: str, rows: list[GroupRows], omitted: int = 0) -> str:
    """The page as text; `omitted` groups are not on it. Raises ModuleNotFoundError without jinja2."""
    return environment().get_template(TEMPLATE).render(title=title, rows=rows, omitted=omitted) + "\n"


def write(path: Path, title: str, rows: list[GroupRows], omitted: int = 0) -> None:
    """Write the page to `path`, in an existing folder."""
    path.write_text(render(title, rows, omitted), encoding="utf-8")


def _row(episode: Episode, decode: Decode) -> EpisodeRow:
    drawn = [version for version, mine in zip(episode.versions, episode.mask, strict=True) if mine]
    return EpisodeRow(
        answer=tuple(_pieces(episode, decode)),
        reward=episode.reward,
        parts=tuple(sorted(episode.parts.items())),
        versions=(drawn[0], drawn[-1]) if drawn else (-1, -1),
        tokens=len(drawn),
        turns=episode.turns,
        finish=episode.finish,
    )


def _pieces(episode: Episode, decode: Decode) -> Iterator[tuple[str, bool]]:
    for mine, part in groupby(zip(episode.tokens, episode.mask, strict=True), key=lambda pair: pair[1]):
        yield decode(tuple(token for token, _ in part)), mine
