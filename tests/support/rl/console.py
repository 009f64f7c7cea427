"""The terminal in which tests run commands."""

from __future__ import annotations

WIDE = {"COLUMNS": "240"}
"""So wide that the path of a test's folder breaks no line."""
