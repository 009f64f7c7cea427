"""Opens the weight store of a run."""

from __future__ import annotations

from holdfast.rl.crew import Site
from holdfast.rl.diary import Diary
from holdfast.store import WeightStore


def open_store(site: Site, diary: Diary, *, hold: bool) -> WeightStore:
    """The run's store; close it after use. Its events go to `diary`."""
    return WeightStore(site.register, replicas=site.replicas, hold=hold, keep=site.keep, observe=diary.note)
