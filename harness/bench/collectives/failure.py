"""The error that ends a contestant."""

from __future__ import annotations


class ContestantFailed(RuntimeError):
    """A library failed in a way that its ranks cannot go on from."""
