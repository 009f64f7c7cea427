"""A holder process: its memory keeps copies of published versions for all others to read."""

from __future__ import annotations

from holdfast.rl.crew import Site
from holdfast.rl.diary import Diary
from holdfast.rl.roles.client import DriverClient
from holdfast.rl.roles.weights import open_store


def hold_weights(site: Site, name: str) -> None:
    """Run the holder `name` until the run is over."""
    with Diary(name) as diary, open_store(site, diary, hold=True), DriverClient(site, name) as driver:
        driver.stay()
