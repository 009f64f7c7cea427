"""Mutations of frames, for fuzzing decoders."""

from __future__ import annotations

from hypothesis import strategies as st

damages = st.tuples(
    st.sampled_from(["flip", "cut", "remove", "insert"]), st.integers(0, 1 << 20), st.integers(0, 1 << 10)
)
"""What may be done to one frame: `mutated([frame], *damage)`."""


def mutated(frames_: list[bytes], kind: str, where: int, what: int) -> list[bytes]:
    """The frames after one mutation of this `kind`."""
    if kind in ("flip", "cut", "remove", "insert"):
        stream = bytearray(b"".join(frames_))
        place = where % (len(stream) + (kind == "insert"))
        match kind:
            case "flip":
                stream[place] ^= 1 << what % 8
            case "cut":
                del stream[place:]
            case "remove":
                del stream[place]
            case "insert":
                stream.insert(place, what % 256)
        return [bytes(stream)]
    chosen, other = where % len(frames_), what % len(frames_)
    if kind == "replay":
        return [*frames_[: other + 1], frames_[chosen], *frames_[other + 1 :]]
    if kind == "swap":
        frames_ = list(frames_)
        frames_[chosen], frames_[other] = frames_[other], frames_[chosen]
        return frames_
    return frames_[:chosen] + frames_[chosen + 1 :]
