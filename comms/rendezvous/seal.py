"""`Seal`: authenticates values at a rendezvous with the job's key."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from holdfast.comms.errors import CorruptData, Mismatch
from holdfast.comms.system.keys import mac

MAGIC = b"HFS1"
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class Seal:
    """Adds and checks MACs of values. A MAC binds a value to the job's key, one meeting (`scope`) and its name."""

    key: bytes = field(repr=False)
    scope: bytes

    def wrap(self, name: str, value: bytes) -> bytes:
        """`value` with its MAC."""
        return MAGIC + self._mac(name, value) + value

    def unwrap(self, name: str, data: bytes) -> bytes:
        """The value in `data`. Raises `CorruptData` unless its MAC fits the job's key, this meeting and `name`."""
        if not data.startswith(MAGIC):
            raise CorruptData(
                f"{name!r} at the rendezvous was written without this job's key: another program wrote it, or a rank "
                "was started without HOLDFAST_KEY_FILE"
            )
        given, value = data[len(MAGIC) :][:_MAC_BYTES], data[len(MAGIC) + _MAC_BYTES :]
        if not hmac.compare_digest(given, self._mac(name, value)):
            raise CorruptData(
                f"{name!r} at the rendezvous does not verify with this job's key: forged, of another meeting, or of a "
                "rank with another key"
            )
        return value

    def bound_to(self, transcript: bytes) -> Seal:
        """A seal bound also to `transcript`, the offers of all ranks: for values written after the meeting."""
        return Seal(mac(self.key, b"rendezvous transcript", self.scope, transcript), self.scope)

    def _mac(self, name: str, value: bytes) -> bytes:
        return mac(self.key, b"rendezvous", self.scope, name.encode(), value)


def check_unsealed(name: str, data: bytes) -> bytes:
    """Return `data` if it has no seal; else raise `Mismatch`, since this process has no key to verify it."""
    if data.startswith(MAGIC):
        raise Mismatch(
            f"{name!r} at the rendezvous is sealed with a job key, and this process has none; start every rank with "
            "the same HOLDFAST_KEY_FILE"
        )
    return data
