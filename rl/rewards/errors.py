"""Errors of rewards."""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError


class RewardFailed(HoldfastError):
    """A reward gave no usable score for an answer; that episode is not trained on. `number` is that of the prompt."""

    def __init__(self, reward: str, number: int, reason: str) -> None:
        self.reward, self.number, self.reason = reward, number, reason
        super().__init__(
            f"reward {reward!r} failed for an answer to prompt {number}: {reason}; the episode is left out and counted"
        )


class NotIdentifiable(HoldfastError):
    """Votes without labels do not determine how good the verifiers are."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"the verifiers' weights cannot be estimated: {reason}; use more answers, or at least three verifiers that "
            "are better than chance and not copies of each other"
        )
