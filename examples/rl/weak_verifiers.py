"""Several weak verifiers as one reward: the probability that an answer is right, given their votes.

    holdfast rl train examples/rl/weak_verifiers.toml

Copy this file beside your configuration, put your own verifiers and sampled answers at its end, right and wrong ones
without labels, and name it in the configuration: kind = "python", function = "weak_verifiers.py:right".

How good each verifier is comes from the votes alone: weak supervision by the method of moments.

Weaver (Saad-Falcon et al. 2025, arXiv:2506.18203) weighs weak verifiers this way. With x_i the vote of verifier i,
p the share of right answers and d_i = P(x_i = 1 | right) - P(x_i = 1 | wrong), votes that are independent given the
truth have (Jaffe, Nadler and Kluger 2015, arXiv:1407.7644), for different i, j, k:

    cov(x_i, x_j)           = p (1 - p) d_i d_j
    third moment (i, j, k)  = p (1 - p) (1 - 2p) d_i d_j d_k

The first is a matrix of rank one off its diagonal, which gives a_i = sqrt(p (1 - p)) d_i; with these, the second gives
p, so no labels and no class balance are needed. Pairs with a covariance far above the fit are dependent: they are
left out of both, and verifiers that are linked by such pairs share one voice.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.comms.errors import HoldfastError
from holdfast.rl.data.episode import Prompt
from holdfast.rl.data.prompts import arithmetic_training
from holdfast.rl.rewards.reward import JudgedAnswer

Verifier = Callable[[JudgedAnswer], float]
"""Votes for an answer by 0.5 or more."""

Matrix = NDArray[np.float64]

_LEAST_ANSWERS = 50
_LEAST_SKILL = 0.05
"""Verifiers with a smaller correlation with the truth are dropped, as are those that always vote alike."""
_DEPENDENT = 0.12
"""The correlation beyond the fit from which on two verifiers count as dependent; at least 4 standard errors."""


class NotIdentifiable(HoldfastError):
    """Votes without labels do not determine how good the verifiers are."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"the verifiers' weights cannot be estimated: {reason}; use more answers, or at least three verifiers that "
            "are better than chance and not copies of each other"
        )


class VerifierWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates from votes: the log-odds that a vote of each verifier adds.

    A vote of 1 and one of 0 add different log-odds; a verifier that was dropped adds 0. `right` is the share of right
    answers, `hits` and `false_alarms` P(1 | right) and P(1 | wrong) of each verifier.
    """

    right: float
    hits: tuple[float, ...]
    false_alarms: tuple[float, ...]
    for_one: tuple[float, ...]
    for_zero: tuple[float, ...]
    dropped: tuple[int, ...]

    def probability(self, votes: Sequence[bool]) -> float:
        """How probable it is that an answer with these votes is right."""
        odds = math.log(self.right / (1.0 - self.right))
        odds += math.fsum(
            one if vote else zero for vote, one, zero in zip(votes, self.for_one, self.for_zero, strict=True)
        )
        return 1.0 / (1.0 + math.exp(-max(-500.0, min(500.0, odds))))


def estimate(votes: Sequence[Sequence[bool]]) -> VerifierWeights:
    """The weights from a row of votes for each answer. Raises `NotIdentifiable`."""
    table = np.asarray(votes, dtype=np.float64)
    if table.ndim != 2 or len(table) < _LEAST_ANSWERS:
        raise NotIdentifiable(f"there are votes on {len(table)} answers, and the least is {_LEAST_ANSWERS}")
    rates = table.mean(0)
    floor = 5.0 / len(table)
    kept = [each for each in range(table.shape[1]) if floor < rates[each] < 1.0 - floor]
    while True:
        if len(kept) < 3:
            raise NotIdentifiable(f"{len(kept)} of {table.shape[1]} verifiers tell right from wrong")
        centred = table[:, kept] - rates[kept]
        covariance = centred.T @ centred / len(table)
        apart, skills = _rank_one(covariance, len(table))
        strength = skills / np.sqrt(np.diag(covariance))
        if strength.min() >= _LEAST_SKILL:
            break
        del kept[int(strength.argmin())]
    right = _right_share(centred, skills, apart)
    return _weights(table.shape[1], kept, rates[kept], skills / math.sqrt(right * (1.0 - right)), right, apart)


def _rank_one(covariance: Matrix, answers: int) -> tuple[NDArray[np.bool_], Matrix]:
    """Pairs that are independent given the truth, and a with a_i a_j near the covariance of each of these pairs.

    Of several explanations, the one with the fewest dependent pairs counts: one may trust a block of copies, and take
    the good verifiers, which agree with each other, for dependent.
    """
    others = ~np.eye(len(covariance), dtype=bool)
    scale = np.sqrt(np.diag(covariance))
    correlation = covariance / np.outer(scale, scale)
    limit = max(_DEPENDENT, 4.0 / math.sqrt(answers))

    def misfit(fit: Matrix) -> float:
        return float(np.minimum(np.abs(correlation - np.outer(fit, fit)), limit)[others].sum())

    best, best_pairs = _least_squares(correlation, others, np.linalg.eigh(correlation)[1][:, -1]), others
    for start in range(len(correlation)):
        fit = _least_deviations(correlation, start)
        apart = others & (correlation - np.outer(fit, fit) < limit)
        if apart.sum(1).min() >= 2:
            fit = _least_squares(correlation, apart, fit)
            if misfit(fit) < misfit(best):
                best, best_pairs = fit, apart
    return best_pairs, (best if best.sum() >= 0 else -best) * scale


def _least_squares(correlation: Matrix, apart: NDArray[np.bool_], fit: Matrix) -> Matrix:
    """The least squares fit of a_i a_j to the pairs in `apart`, near `fit`, by damped alternating updates."""
    used = np.where(apart, correlation, 0.0)
    for _ in range(200):
        fit = 0.5 * fit + 0.5 * (used @ fit) / np.maximum(apart @ (fit * fit), 1e-12)
    return fit


def _least_deviations(correlation: Matrix, start: int) -> Matrix:
    """A local minimum of the absolute deviations of a_i a_j, near the explanation that trusts verifier `start`."""
    fit: Matrix = correlation[start].copy()
    fit[start] = 0.0
    fit[start] = max(float(np.abs(fit).max()), 1e-6)
    fit /= math.sqrt(float(fit[start]))
    for _ in range(30):
        for one in range(len(fit)):
            used = (np.arange(len(fit)) != one) & (np.abs(fit) > 1e-9)
            if used.any():
                fit[one] = _weighted_median(correlation[one, used] / fit[used], np.abs(fit[used]))
    return fit


def _weighted_median(values: Matrix, weights: Matrix) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(reached, reached[-1] / 2.0))])


def _right_share(centred: Matrix, skills: Matrix, apart: NDArray[np.bool_]) -> float:
    """The share of right answers, by the third moments of verifiers that are independent in pairs."""
    over = under = 0.0
    for one, two, three in itertools.combinations(range(len(skills)), 3):
        if apart[one, two] and apart[one, three] and apart[two, three]:
            moment = float((centred[:, one] * centred[:, two] * centred[:, three]).mean())
            product = float(skills[one] * skills[two] * skills[three])
            over, under = over + moment * product, under + product * product
    skew = over / under if under > 0 else 0.0
    return min(0.95, max(0.05, 0.5 * (1.0 - skew / math.sqrt(skew * skew + 4.0))))


def _weights(
    many: int, kept: Sequence[int], rates: Matrix, gaps: Matrix, right: float, apart: NDArray[np.bool_]
) -> VerifierWeights:
    hits, alarms = (np.clip(rates - share * gaps, 0.01, 0.99) for share in (right - 1.0, right))
    near = (~apart).astype(np.int64)
    voices = (np.linalg.matrix_power(near, len(near)) > 0).sum(1)  # how many are linked with each, itself included

    def of_all(values: Matrix, otherwise: float) -> tuple[float, ...]:
        whole = np.full(many, otherwise)
        whole[kept] = values
        return tuple(whole.tolist())

    return VerifierWeights(
        right=right,
        hits=of_all(hits, 0.5),
        false_alarms=of_all(alarms, 0.5),
        for_one=of_all(np.log(hits / alarms) / voices, 0.0),
        for_zero=of_all(np.log((1.0 - hits) / (1.0 - alarms)) / voices, 0.0),
        dropped=tuple(each for each in range(many) if each not in kept),
    )


class WeakVerifierEnsemble:
    """The probability that an answer is right, given the votes of verifiers on it.

    The weights come from the votes on `answers`, which need no labels, and are fixed then: an answer's reward does not
    depend on the answers before it. Raises `NotIdentifiable`.
    """

    def __init__(self, verifiers: Sequence[Verifier], answers: Sequence[JudgedAnswer]) -> None:
        self._verifiers = tuple(verifiers)
        self.weights = estimate([self.votes(each) for each in answers])

    def votes(self, answer: JudgedAnswer) -> list[bool]:
        """The vote of each verifier. Raises what a verifier does: the reward fails for that answer."""
        return [verifier(answer) >= 0.5 for verifier in self._verifiers]

    def __call__(self, answer: JudgedAnswer) -> float:
        """The reward of an answer."""
        return self.weights.probability(self.votes(answer))


# -- three verifiers of sums of three digits, none of which adds


def _addends(answer: JudgedAnswer) -> list[int]:
    return [int(each) for each in answer.prompt.text.rstrip("=").split("+")]


def _said(answer: JudgedAnswer) -> int:
    return int(answer.text) if answer.text.isdecimal() else -1


def parity(answer: JudgedAnswer) -> float:
    """Whether the answer is odd as it must be."""
    return float(_said(answer) % 2 == sum(each % 2 for each in _addends(answer)) % 2)


def size(answer: JudgedAnswer) -> float:
    """Whether the answer is between thrice the smallest and thrice the largest number, and near their middle."""
    addends = _addends(answer)
    return float(abs(_said(answer) - 1.5 * (min(addends) + max(addends))) <= 3)


def rest(answer: JudgedAnswer) -> float:
    """Whether the answer leaves the right rest when it is divided by 9: that of the sum of all digits."""
    return float(_said(answer) % 9 == sum(_addends(answer)) % 9)


def sampled(count: int = 400) -> list[JudgedAnswer]:
    """Answers as a policy draws them, about half of them right."""
    dice, found = random.Random(0), []
    for number in range(count):
        problem = dice.choice(arithmetic_training())
        text = problem.answer if dice.random() < 0.5 else f"{dice.randrange(28):02d}"
        prompt = Prompt(number=number, tokens=(0,), text=problem.prompt, answer="")
        found.append(JudgedAnswer(prompt=prompt, text=text, length=len(text)))
    return found


right = WeakVerifierEnsemble((parity, size, rest), sampled())
"""The reward."""
