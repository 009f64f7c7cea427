"""Rendezvous: resolves a URL or store to a meeting place, and exchanges what each rank can run."""

from __future__ import annotations

from holdfast.comms.rendezvous.fetching import fetch, fetch_as
from holdfast.comms.rendezvous.meeting_place import MeetingPlace, meet, rank_and_size

__all__ = ["MeetingPlace", "fetch", "fetch_as", "meet", "rank_and_size"]
