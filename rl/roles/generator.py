"""A generator process: takes units from the driver, reads their weights from the store, returns the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from holdfast.rl.crew import INSIDE_GENERATION, Site
from holdfast.rl.diary import Diary
from holdfast.rl.learning import model
from holdfast.rl.learning.generate import exact_match, generate
from holdfast.rl.learning.recipe import Recipe
from holdfast.rl.roles import wire
from holdfast.rl.roles.client import DriverClient
from holdfast.rl.roles.weights import open_store
from holdfast.rl.units import Unit
from holdfast.store import NoSuchVersion, WeightStore

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

WEIGHTS_SECONDS = 20.0
"""Seconds that reading a published version may take."""


class Policies:
    """Models by weights version; the newest `keep` stay, so that a requeued unit finds its weights here."""

    def __init__(self, store: WeightStore, recipe: Recipe, diary: Diary, keep: int) -> None:
        self._store, self._recipe, self._diary, self._keep = store, recipe, diary, keep
        self._models: dict[int, LlamaForCausalLM] = {}

    def of(self, version: int) -> LlamaForCausalLM:
        """The model with the weights of `version`. Raises the store's error if they cannot be read."""
        if version not in self._models:
            full = len(self._models) == self._keep
            policy = self._models.pop(min(self._models)) if full else model.build(self._recipe.seed)
            with self._diary.doing("fetch", version):
                self._store.get(version, policy.state_dict(), timeout=WEIGHTS_SECONDS)
            self._models[version] = policy
        return self._models[version]


def generate_units(site: Site, name: str, recipe: Recipe) -> None:
    """Run the generator `name` until the run is over."""
    torch.set_num_threads(1)
    with (
        Diary(name) as diary,
        open_store(site, diary, hold=False) as store,
        DriverClient(site, name) as driver,
    ):
        policies = Policies(store, recipe, diary, keep=recipe.lag + 2)
        reply = driver.work()
        while not reply.over:
            unit = reply.unit
            if unit is None:
                reply = driver.work()
            elif unit.kind == "evaluate":
                reply = driver.work(unit, _evaluate(unit, policies, diary))
            else:
                reply = driver.work(unit, _generate(unit, policies, recipe, driver, diary))


def _evaluate(unit: Unit, policies: Policies, diary: Diary) -> bytes:
    """An encoded score, or nothing if the version is superseded, because an earlier worker died with the unit."""
    try:
        policy = policies.of(unit.version)
    except NoSuchVersion:
        return b""
    with diary.doing("evaluate", unit.version):
        return wire.encode(wire.EvaluationScore(exact_match(policy), model.digest(policy)))


def _generate(unit: Unit, policies: Policies, recipe: Recipe, driver: DriverClient, diary: Diary) -> bytes:
    policy = policies.of(unit.version)
    with diary.doing("generate", unit.step):
        samples = generate(
            policy, recipe, unit.step, unit.number, between=lambda: driver.reach(INSIDE_GENERATION, unit.step)
        )
    return wire.pack_samples(samples)
