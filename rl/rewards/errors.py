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
