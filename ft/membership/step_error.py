"""An exception of a user's code in a step, as other processes of the job receive it."""

from __future__ import annotations

import msgspec


class StepError(msgspec.Struct, frozen=True):
    """An exception in step `step` on rank `rank`: its type, its message, and where it was raised."""

    step: int
    rank: int
    kind: str
    message: str
    place: str

    def repeats(self, earlier: StepError) -> bool:
        """Whether it is the same exception again, on any rank, in the same step or the next.

        The next step counts, because a step is committed without the rank that raised if all others had done their
        part.
        """
        alike = msgspec.structs.replace(self, step=earlier.step, rank=earlier.rank) == earlier
        return alike and self.step - earlier.step in (0, 1)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} (step {self.step}, rank {self.rank}, {self.place})"
