"""The interface that a communicator backend implements, and the types it is given."""

from holdfast.comms.transport.base import Context, Peer, Transport

__all__ = ["Context", "Peer", "Transport"]
