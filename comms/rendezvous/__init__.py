"""Where ranks meet before they are connected: places, the store behind them, and what the ranks offer each other."""

from __future__ import annotations

from holdfast.comms.rendezvous.fetching import fetch, fetch_as
from holdfast.comms.rendezvous.meeting_place import MeetingPlace, meet

__all__ = ["MeetingPlace", "fetch", "fetch_as", "meet"]
