"""Mutations of frames, for fuzzing decoders."""

from __future__ import annotations

from hypothesis import strategies as st

damages = st.tuples(
    st.sampled_from(["flip", "cut", "remove", "insert"]), st.integers(0, 1 << 20), st.integers(0, 1 << 10)
)
"""What may be done to one frame: `mutated([frame], *damage)`."""


def mutated(frames_: list[bytes], kind: str, where: int, what: int) -> list[bytes]:
    """The frames after one mutation of this `kind`."""
    stream, frames = bytearray(b"".join(frames_)), list(frames_)
    chosen, other = where % len(frames), what % len(frames)
    match kind:
        case "replay":
            frames.insert(other + 1, frames[chosen])
        case "swap":
            frames[chosen], frames[other] = frames[other], frames[chosen]
        case "drop":
            del frames[chosen]
        case "flip":
            stream[where % len(stream)] ^= 1 << what % 8
        case "cut":
            del stream[where % len(stream) :]
        case "remove":
            del stream[where % len(stream)]
        case "insert":
            stream.insert(where % (len(stream) + 1), what % 256)
    return frames if kind in ("replay", "swap", "drop") else [bytes(stream)]
