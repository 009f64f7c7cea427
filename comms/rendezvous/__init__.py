"""Rendezvous: resolves a URL or store to a meeting place, and exchanges what each rank can run."""

from __future__ import annotations

from holdfast.comms.rendezvous.meeting_place import MeetingPlace, meet, rank_and_size
from holdfast.comms.rendezvous.meeting_store import fetch, fetch_as

__all__ = ["MeetingPlace", "fetch", "fetch_as", "meet", "rank_and_size"]
