"""A generator process: takes units from the driver, pulls the weights that each needs, gives the results back."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

from holdfast.rl import model, wire
from holdfast.rl.client import DriverClient
from holdfast.rl.crew import INSIDE_GENERATION, Site
from holdfast.rl.generate import exact_match, generate
from holdfast.rl.recipe import Recipe
from holdfast.rl.units import Unit
from holdfast.store import WeightStore

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

WEIGHTS_SECONDS = 20.0
"""How long a generator waits for a version that the driver says is published."""


class Policies:
    """Models by weights version. The newest `keep` are kept, so that a unit that comes back finds its weights here."""

    def __init__(self, store: WeightStore, recipe: Recipe, keep: int) -> None:
        self._store, self._recipe, self._keep = store, recipe, keep
        self._models: OrderedDict[int, LlamaForCausalLM] = OrderedDict()

    def of(self, version: int) -> LlamaForCausalLM:
        """The model with the weights of `version`; raises what the store raises if they cannot be had."""
        if version not in self._models:
            full = len(self._models) == self._keep
            policy = self._models.pop(min(self._models)) if full else model.build(self._recipe.seed)
            self._store.get(version, into=policy.state_dict(), timeout=WEIGHTS_SECONDS)
            self._models[version] = policy
        return self._models[version]


def generate_units(site: Site, name: str, recipe: Recipe) -> None:
    """The whole life of the generator `name`: until the run is over."""
    torch.set_num_threads(1)
    with WeightStore(site.register, hold=False) as store, DriverClient(site, name) as driver:
        policies = Policies(store, recipe, keep=recipe.lag + 2)
        reply = driver.work()
        while not reply.over:
            if reply.unit is None:
                reply = driver.work()
            else:
                reply = driver.work(reply.unit, _do(reply.unit, policies.of(reply.unit.version), recipe, driver))


def _do(unit: Unit, policy: LlamaForCausalLM, recipe: Recipe, driver: DriverClient) -> bytes:
    if unit.kind == "evaluate":
        return wire.encode(wire.Score(exact_match(policy)))
    samples = generate(
        policy, recipe, unit.step, unit.number, between=lambda: driver.reach(INSIDE_GENERATION, unit.step)
    )
    return wire.pack_samples(samples)
