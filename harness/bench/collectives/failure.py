"""The errors of contestants."""

from __future__ import annotations


class ContestantFailed(RuntimeError):
    """A library failed in a way that its ranks cannot go on from."""


class OpFailed(RuntimeError):
    """An op failed alike on all ranks of a library, which can go on with other ops."""
