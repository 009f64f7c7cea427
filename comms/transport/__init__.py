"""What a backend implements, and what it is told."""

from holdfast.comms.transport.base import Context, FastPath, Form, Observed, Peer, Transport

__all__ = ["Context", "FastPath", "Form", "Observed", "Peer", "Transport"]
