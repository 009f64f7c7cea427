"""`FaultList`: collects everything that is wrong with an argument, and raises it as one error."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.comms.errors import Mismatch, Unsupported

SHOWN = 8
"""The most faults that a message spells out."""

_KINDS: tuple[type[Exception], ...] = (TypeError, ValueError, Unsupported, Mismatch)


class Fault(NamedTuple):
    """One thing that is wrong: the error it would be alone, the name it concerns, and a sentence."""

    kind: type[Exception]
    name: str
    text: str


class FaultList:
    """The faults of one argument, in the order found.

    The error of several faults has the first kind of: TypeError, ValueError, `Unsupported`, `Mismatch`.
    """

    def __init__(self) -> None:
        self.found: list[Fault] = []

    def add(self, kind: type[Exception], name: str, text: str) -> None:
        self.found.append(Fault(kind, name, text))

    def check(self) -> None:
        """Raise the faults, if any, as one error."""
        if self.found:
            raise_all(self.found)


def raise_all(faults: list[Fault]) -> None:
    """Raise all faults as one error that spells out the first ones and counts the rest."""
    kinds = {fault.kind for fault in faults}
    kind = next(each for each in _KINDS if each in kinds)
    words = "; ".join(fault.text for fault in faults[:SHOWN])
    if len(faults) > SHOWN:
        words += f"; and {len(faults) - SHOWN} more"
    raise kind(f"{len(faults)} faults: {words}" if len(faults) > 1 else words)
