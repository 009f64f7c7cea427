"""Errors of prompts, episodes and the replay buffer."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.comms.errors import HoldfastError


class InvalidEpisode(HoldfastError):
    """A prompt, completion, episode, group or request contradicts itself.

    `kind` is its type, `number` that of its prompt, None if it has none.
    """

    def __init__(self, kind: str, number: int | None, reason: str) -> None:
        self.kind, self.number, self.reason = kind, number, reason
        of = "" if number is None else f" of prompt {number}"
        super().__init__(f"{kind}{of}: {reason}; correct what made it: nothing of it was used")


class StalenessUnreachable(HoldfastError):
    """No schedule fills a batch under this staleness bound and capacity."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"a batch can never fill: {reason}")


class StaleGroup(HoldfastError):
    """A group has a token older than its permit allows; it was not added. Draw it again with newer weights."""

    def __init__(self, number: int, version: int, permitted: int) -> None:
        self.number, self.version, self.permitted = number, version, permitted
        super().__init__(
            f"the group of prompt {number} has a token of version {version}, and its permit is for {permitted} or "
            "later: bring the generator to that version before it serves, and draw the group again"
        )


class OtherVersion(HoldfastError):
    """Held-out episodes of one version have tokens that others drew: their rewards say nothing about it."""

    def __init__(self, version: int, others: Sequence[int]) -> None:
        self.version, self.others = version, tuple(others)
        super().__init__(
            f"the held-out episodes of version {version} have tokens of {', '.join(map(str, others))}: a generator did "
            "not keep to the version that the request names; nothing was recorded"
        )


class OutOfOrder(HoldfastError):
    """A call to the replay buffer that no order of events allows; nothing was changed."""


class BufferStalled(HoldfastError, TimeoutError):
    """Nothing was added to or trained from the replay buffer for too long while a caller waited."""

    def __init__(self, waiting: str, seconds: float, state: str) -> None:
        self.waiting = waiting
        super().__init__(
            f"{waiting}: nothing was added, trained or served for {seconds:.3g} s; {state}; look whether the "
            "generators run, or raise the buffer's `patience`"
        )


class BadDataset(HoldfastError):
    """A file of prompts cannot be used. `source` names it, `line` (from 1) is the first bad one."""

    def __init__(self, source: str, line: int | None, reason: str) -> None:
        self.source, self.line, self.reason = source, line, reason
        super().__init__(f"{source}{'' if line is None else f':{line}'}: {reason}")
