"""How the workers of a run open its weight store."""

from __future__ import annotations

from holdfast.rl.crew import Site
from holdfast.rl.diary import Diary
from holdfast.store import WeightStore


def open_store(site: Site, diary: Diary, *, hold: bool) -> WeightStore:
    """The run's store; close it after use. What happens in it goes into `diary`."""
    return WeightStore(site.register, replicas=site.replicas, hold=hold, keep=site.keep, observe=diary.note)
