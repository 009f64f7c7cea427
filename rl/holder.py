"""A process that holds weights: its memory keeps copies of published versions for all others to read."""

from __future__ import annotations

from holdfast.rl.client import DriverClient
from holdfast.rl.crew import Site
from holdfast.store import WeightStore


def hold_weights(site: Site, name: str) -> None:
    """The whole life of the holder `name`: until the run is over."""
    with WeightStore(site.register, replicas=site.replicas, hold=True), DriverClient(site, name) as driver:
        driver.stay()
