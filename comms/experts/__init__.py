"""Exchange tokens between experts on several ranks, and go on in the same epoch when a rank dies: see `Switch`."""

from holdfast.comms.experts.switch import Received, Switch

__all__ = ["Received", "Switch"]
