"""The interface that a communicator backend implements, and the types it is given."""

from holdfast.comms.transport.base import Context, FastPath, Form, Observed, Peer, Transport

__all__ = ["Context", "FastPath", "Form", "Observed", "Peer", "Transport"]
