"""A trainer process: a rank of an `ft.Session` whose steps are gradients of GRPO, or a spare.

A step's shards are its units: each unit's gradient is computed by itself, and the sum of all has the same bits
whichever rank computed which. So the weights after a step depend neither on the ranks that did it nor on the number of
attempts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from holdfast import ft
from holdfast.comms import Communicator, Revoked, StaleEpoch, register, unregister
from holdfast.comms.plugins.spec import OpEvent, hookimpl
from holdfast.comms.reproducible import sum_contributions
from holdfast.rl.crew import INSIDE_REDUCTION, Site
from holdfast.rl.diary import Diary
from holdfast.rl.learning import generate, grpo, model
from holdfast.rl.learning.recipe import Recipe
from holdfast.rl.learning.warmup import warm_up
from holdfast.rl.roles import wire
from holdfast.rl.roles.client import DriverClient
from holdfast.rl.roles.weights import open_store
from holdfast.store import StoreTimeout, WeightStore

REDUCTION = "sum_contributions"
"""The op that is a reproducible all_reduce of the gradients."""

SAMPLES_SECONDS = 60.0
"""Seconds that a trainer waits for the samples of a step."""

HANDOVER_SECONDS = 2.0
"""Seconds that the other trainers wait for rank 0 to publish the last version before they publish it."""


class Revocations:
    """The epochs that a session has revoked, for waits that are no ops and must end with their epoch."""

    def __init__(self) -> None:
        self._newest = 0
        self._reason = ""
        self._lock = threading.Lock()

    def listen(self, event: dict[str, Any]) -> None:
        """A listener to the session's events."""
        if event["kind"] == "revoked":
            with self._lock:
                self._newest, self._reason = max(self._newest, event["epoch"]), event["reason"]

    def check(self, epoch: int) -> None:
        """Raise `Revoked` if `epoch` is over."""
        with self._lock:
            if epoch <= self._newest:
                raise Revoked(epoch, self._reason)


class Trainer:
    """The policy of one trainer, its optimizer, and its part in a step."""

    def __init__(
        self, recipe: Recipe, store: WeightStore, driver: DriverClient, diary: Diary, revocations: Revocations
    ) -> None:
        self.recipe = recipe
        self.policy = model.build(recipe.seed)
        self.optimizer = grpo.optimizer(self.policy, recipe)
        self._store, self._driver, self._diary, self._revocations = store, driver, diary, revocations
        self._total = torch.empty(model.PARAMETERS, device="cpu")
        self._published = -1
        self._step = 0

    def warm_up(self) -> None:
        """Take the supervised steps before the first step, and report to the driver."""
        untrained = generate.exact_match(self.policy)
        self._driver.warmed(untrained, warm_up(self.policy, self.recipe))

    def attempt(self, comm: Communicator, step: int, units: Sequence[int]) -> None:
        """Sum the gradients of a step over all ranks; this rank computes those of `units`.

        Rank 0 ensures that the weights before the step are published. Changes neither policy nor optimizer.
        """
        self._step = step
        if comm.rank == 0:
            self.publish(step, comm.epoch)
        request = wire.TakeRequest(step, tuple(units), comm.epoch, comm.rank, comm.size, self._published)
        taken = self._driver.take(request, lambda: self._revocations.check(comm.epoch), SAMPLES_SECONDS)
        with self._diary.doing("train", step):
            gradients = [
                grpo.gradient(self.policy, wire.unpack_samples(each, self.recipe.unit_samples), self.recipe)
                for each in taken
            ]
        sum_contributions(comm, gradients, self._total)

    def update(self, step: int) -> None:
        """Take the optimizer's step with the gradient of the attempt at `step`, which is committed."""
        with self._diary.doing("update", step):
            grpo.update(self.policy, self.optimizer, self._total, self.recipe, step)
        self._diary.note("updated", {"step": step, "digest": model.digest(self.policy)})

    def publish(self, version: int, epoch: int) -> None:
        """Ensure that the current weights are published as `version`. Raises `Revoked` if a later epoch does so."""
        if self._published >= version:
            return
        with self._diary.doing("publish", version):
            try:
                self._store.publish(version, self.policy.state_dict(), fence=epoch)
            except StaleEpoch as error:
                raise Revoked(epoch, str(error)) from error
        self._published = version

    def finish(self, epoch: int, rank: int, size: int) -> None:
        """After the last step, ensure that the last weights are published, and report to the driver."""
        last = self.recipe.steps
        if rank != 0:
            try:
                self._published = self._store.wait(last, HANDOVER_SECONDS)
            except StoreTimeout:
                pass
        self.publish(last, epoch)
        self._driver.finished(wire.Finished(model.digest(self.policy), epoch, size, last))

    @hookimpl
    def before_op(self, event: OpEvent) -> None:
        """The plugin hook for the beginning of an op."""
        if event.op == REDUCTION:
            self._driver.reach(INSIDE_REDUCTION, self._step)

    @hookimpl
    def after_op(self, event: OpEvent) -> None:
        """The plugin hook for the end of an op."""
        fields: dict[str, object] = {"op": event.op, "seq": event.seq, "epoch": event.epoch, "step": self._step}
        fields |= {"seconds": event.seconds, "bytes": event.nbytes}
        if event.error is not None:
            fields["error"] = f"{type(event.error).__name__}: {event.error}"
        self._diary.note("op", fields)


def train(site: Site, name: str, recipe: Recipe, founder: bool) -> None:
    """Run the trainer `name` until the job is finished.

    A `founder` may be among the first members, so it warms its policy up; later members get the policy from them.
    """
    torch.set_num_threads(1)
    with (
        Diary(name) as diary,
        open_store(site, diary, hold=False) as store,
        DriverClient(site, name) as driver,
    ):
        revocations = Revocations()
        trainer = Trainer(recipe, store, driver, diary, revocations)
        if founder:
            trainer.warm_up()
        with ft.Session(shards=recipe.units) as session, _observed_by(trainer):
            session.subscribe(revocations.listen)
            session.attach("policy", trainer.policy)
            session.attach("optimizer", trainer.optimizer)
            for attempt in session.steps(recipe.steps):
                with attempt:
                    trainer.attempt(attempt.comm, attempt.step, attempt.shards)
                if attempt.committed:
                    trainer.update(attempt.step)
            if session.step == recipe.steps and session.epoch and session.rank is not None and session.size:
                trainer.finish(session.epoch, session.rank, session.size)


@contextmanager
def _observed_by(plugin: object) -> Iterator[None]:
    """Call the hooks of `plugin` for every op of this process."""
    register(plugin)
    try:
        yield
    finally:
        unregister(plugin)
