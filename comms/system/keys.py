"""The job's key: 32 random bytes in an owner-only file, which the launcher makes.

A process that has the key is trusted as a member of the job. `Seal` authenticates values with it.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch

KEY_BYTES = 32
KEY_FILE = "HOLDFAST_KEY_FILE"
"""The environment variable that says where the job's key is."""


class KeyRefused(HoldfastError):
    """The key file cannot be trusted or used."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"key file {path}: {reason}")


def create_key(path: str | os.PathLike[str]) -> bytes:
    """Write a new key to a new file of mode 0600, as 64 hexadecimal digits, and return its 32 bytes.

    Raises FileExistsError if the file exists, and leaves it unchanged.
    """
    key = os.urandom(KEY_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)
        file.write(key.hex() + "\n")
    return key


def load_key(path: str | os.PathLike[str]) -> bytes:
    """Read the key, 32 bytes, from a file that only this user can read.

    Raises `KeyRefused` for a file that is missing, belongs to another user, can be read by others, or holds no key.
    """
    path = Path(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # so that a FIFO does not block
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(2 * KEY_BYTES + 2)
    except OSError as error:
        raise KeyRefused(path, f"cannot be read: {error.strerror}; is it on this host?") from error
    if not stat.S_ISREG(found.st_mode):
        raise KeyRefused(path, "is not a regular file")
    if found.st_uid != os.geteuid():
        raise KeyRefused(path, f"belongs to user {found.st_uid}, not to this one ({os.geteuid()})")
    if found.st_mode & 0o077:
        raise KeyRefused(
            path, f"has mode {stat.S_IMODE(found.st_mode):04o}, so others may know it; make a new one (0600)"
        )
    if not re.fullmatch(rb"[0-9a-f]{64}\n?", text):
        raise KeyRefused(path, f"does not hold {2 * KEY_BYTES} hexadecimal digits")
    return bytes.fromhex(text.decode())


def job_key() -> bytes | None:
    """Read the key from the file that HOLDFAST_KEY_FILE names; None if it is not set. Raises `KeyRefused`."""
    path = os.environ.get(KEY_FILE)
    return load_key(path) if path else None


def mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """The HMAC of `parts`, each hashed separately so that boundaries count. `label` names this use of the key."""
    hashed = b"".join(sha256(part).digest() for part in parts)
    return hmac.digest(key, b"holdfast " + label + b"\0" + hashed, "sha256")


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
