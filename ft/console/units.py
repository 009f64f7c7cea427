"""How commands, reports and logs print seconds, bytes and counts."""

from __future__ import annotations

_BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def format_seconds(seconds: float) -> str:
    """A time of 0 or more with its unit, to three figures.

    For example 0.61 us, 12.3 ms, 1.25 s, 2 min 5 s, 1.5 h.
    """
    if seconds >= 5400:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.3g} us"


def coarse_seconds(seconds: float) -> str:
    """`format_seconds` in whole milliseconds below a second; below 10 ms with two figures: 42 ms, 0.91 ms."""
    if seconds >= 0.9995:
        return format_seconds(seconds)
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.00995 else f"{1e3 * seconds:.0f} ms"


def format_bytes(nbytes: int) -> str:
    """A number of bytes with its unit: 8 B, 64 KiB, 1.5 MiB."""
    for unit, name in _BYTES:
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun in the number that agrees: 1 rebuild, 2 rebuilds, 1,000 steps."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def reward_text(reward: float) -> str:
    """A mean reward: 47.5% from 0 to 1, as a share of right answers is, and otherwise 2.31."""
    return f"{reward:.1%}" if 0.0 <= reward <= 1.0 else f"{reward:.2f}"
