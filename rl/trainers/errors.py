"""Errors of trainers."""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError


class NonFiniteLoss(HoldfastError):
    """The loss or the gradient of a step is NaN or infinite; the step is not committed."""

    def __init__(self, step: int, loss: float, norm: float) -> None:
        self.step, self.loss, self.norm = step, loss, norm
        super().__init__(
            f"step {step} has the loss {loss} and a gradient of norm {norm}: nothing is committed; look at the rewards "
            "and log-probs of its batch, and lower the learning rate"
        )


class BadBatch(HoldfastError):
    """A batch that cannot be trained on; the step is not committed."""

    def __init__(self, step: int, why: str) -> None:
        self.step, self.why = step, why
        super().__init__(f"the batch of step {step} cannot be trained on: {why}")


class NoBatch(HoldfastError):
    """The batch of a step did not come in time."""

    def __init__(self, step: int, seconds: float, newest: int | None) -> None:
        self.step, self.seconds, self.newest = step, seconds, newest
        has = "none has come" if newest is None else f"the newest is that of step {newest}"
        super().__init__(
            f"the batch of step {step} did not come within {seconds:.3g} s: {has}; send it to all trainers"
        )


class TrainerEnded(HoldfastError):
    """The trainer does not train any more: it was closed, or its steps ended with the error in `why`.

    `fault`: that error is none of holdfast's own, so its traceback has to be seen.
    """

    def __init__(self, why: str, *, fault: bool = False) -> None:
        self.why, self.fault = why, fault
        super().__init__(f"the trainer has ended: {why}; start another one")


class TrainerEvicted(TrainerEnded):
    """The other trainers go on without this one, which they took for dead; its process must be replaced."""

    retryable = True


class TrainerUnjoined(TrainerEnded):
    """The trainer could not join the others for a reason that passes; its process must be replaced."""

    retryable = True


class TrainersLost(HoldfastError):
    """No trainer is left to train on a batch; `errors` says how each one ended."""

    def __init__(self, step: int, errors: tuple[str, ...]) -> None:
        self.step, self.errors = step, errors
        known = "; ".join(errors) or "none was there"
        super().__init__(f"no trainer is left for step {step}: {known}; resume from a checkpoint")
