"""The errors of the control channel. After any of them but `RemoteError` and the timeouts, the connection is gone."""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed


class ControlError(HoldfastError):
    """Base class of the control channel's errors."""


class WrongKey(ControlError):
    """The two sides do not hold the same job key."""


class WrongJob(ControlError):
    """The two sides hold the same key but belong to different jobs."""


class Busy(ControlError):
    """The listener dropped the connection before it was authenticated, because too many others came in."""


class BadFrame(ControlError):
    """The other side sent what the protocol does not allow."""


class FrameTooLarge(BadFrame):
    """A frame above the size limit, refused before it was received or sent."""

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"a control frame of {size} bytes is over the limit of {limit}; move bulk data by other means")


class UnknownVersion(BadFrame):
    """The other side speaks another version of the protocol."""

    def __init__(self, theirs: int, ours: int) -> None:
        self.theirs, self.ours = theirs, ours
        super().__init__(f"the other side speaks control protocol {theirs}, this one {ours}; install the same holdfast")


class ForgedFrame(BadFrame):
    """A frame with a wrong MAC: forged, altered, replayed or out of order."""


class TruncatedFrame(BadFrame):
    """The stream ended inside a frame."""


class ConnectionLost(ControlError, PeerFailed):
    """The connection to `peer` (its identity, or its address before that is known) ended or could not be made."""

    def __init__(self, peer: str, evidence: str) -> None:
        PeerFailed.__init__(self, (), evidence)
        self.peer = peer
        self.args = (f"no connection to {peer}: {evidence}",)


class ConnectionClosed(ConnectionLost):
    """The connection ended between two messages: one of the sides closed it, or its process died."""


class ConnectionRefused(ConnectionLost):
    """The host of `peer` answers that no process listens at its address."""


class Dropped(ConnectionLost):
    """The other side closed the connection during the handshake without a reason, as it may under a flood."""


def cannot_connect(address: str, error: OSError) -> ConnectionLost:
    """The error of a dial to `address` that ended with `error`."""
    kind = ConnectionRefused if isinstance(error, ConnectionRefusedError) else ConnectionLost
    return kind(address, f"cannot connect: {os.strerror(error.errno) if error.errno else error}")


CONNECTION_ERRORS = frozenset(kind.__name__ for kind in (ConnectionLost, ConnectionClosed, ConnectionRefused, Dropped))
"""The names of the types of lost connections, as `RemoteError.kind` has them."""


class RemoteError(ControlError):
    """The handler of a call failed on the other side. `kind` is the name of the error's type there."""

    def __init__(self, peer: str, method: str, kind: str, message: str) -> None:
        self.peer, self.method, self.kind, self.message = peer, method, kind, message
        super().__init__(f"{method} failed on {peer}: {kind}: {message}")


class CallTimeout(ControlError, OpTimeout):
    """`peer` did not answer in time: `op` is what was asked, `waited` the seconds. The connection stays open."""

    def __init__(self, op: str, peer: str, waited: float) -> None:
        OpTimeout.__init__(self, op, 0, waited)
        self.peer = peer
        self.args = (f"{op} was not answered by {peer} within {waited:.3g} s; is it stopped or overloaded?",)


class KeyTimeout(ControlError, OpTimeout):
    """Keys of the rendezvous table were not set in time: `missing` are their names, `waited` the seconds."""

    def __init__(self, missing: Sequence[str], waited: float) -> None:
        OpTimeout.__init__(self, "wait for keys", 0, waited)
        self.missing = tuple(missing)
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        self.args = (f"nobody set {', '.join(map(repr, missing[:5]))}{more} within {waited:.3g} s",)
