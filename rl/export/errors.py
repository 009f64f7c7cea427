"""Errors of exports."""

from __future__ import annotations

from pathlib import Path

from holdfast.comms.errors import HoldfastError


class ExportRefused(HoldfastError):
    """A version was not exported: the program differs from the model, or could not be made. Nothing is left of it."""

    def __init__(self, out: Path, why: str) -> None:
        self.out, self.why = out, why
        super().__init__(f"{out} was not written: {why}")
