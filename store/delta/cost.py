"""When a delta pays: a model of the time that a reader waits for a new version."""

from __future__ import annotations

DIFF_SECONDS_PER_BYTE = 1 / 7e9
"""For each byte of a part, to find what changed (two threads that read both versions, 15 GB/s in all)."""
PATCH_SECONDS_PER_BYTE = 1 / 6e9
"""For each byte of a part, to make the new version beside its base and verify it."""
ROUND_TRIP_SECONDS = 0.5e-3
"""For one more read: a delta lies in a region of its own."""


def pays(delta_bytes: int, whole_bytes: int, bytes_per_second: float) -> bool:
    """Whether a reader has a part of `whole_bytes` earlier by a delta, at this speed of reading from its holders.

    `delta_bytes` are all bytes that such a reader needs: the delta, and the pieces that have to be read whole.
    """
    whole = whole_bytes / bytes_per_second
    work = whole_bytes * (DIFF_SECONDS_PER_BYTE + PATCH_SECONDS_PER_BYTE)
    return delta_bytes / bytes_per_second + work + ROUND_TRIP_SECONDS < whole
