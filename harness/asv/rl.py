"""The reference workload: one unit of generation, its gradient, and the bookkeeping of units."""

from __future__ import annotations


class Learning:
    """Seconds for 32 prompts in groups of 8 on the tiny policy, one thread."""

    rounds = 1
    repeat = (5, 20, 2.0)
    timeout = 120

    def setup(self) -> None:
        import torch

        from holdfast.rl.learning.generate import generate
        from holdfast.rl.learning.model import build
        from holdfast.rl.learning.recipe import Recipe

        if not hasattr(self, "policy"):
            torch.set_num_threads(1)
            self.recipe = Recipe()
            self.policy = build(0)
            self.samples = generate(self.policy, self.recipe, 0, 0)

    def time_generate(self) -> None:
        from holdfast.rl.learning.generate import generate

        generate(self.policy, self.recipe, 0, 0)

    def time_gradient(self) -> None:
        from holdfast.rl.learning.grpo import gradient

        gradient(self.policy, self.samples, self.recipe)

    def peakmem_gradient(self) -> None:
        from holdfast.rl.learning.grpo import gradient

        gradient(self.policy, self.samples, self.recipe)


class Bookkeeping:
    """Seconds to lease and complete all units of 200 steps."""

    def time_units(self) -> None:
        from holdfast.rl.learning.recipe import Recipe
        from holdfast.rl.units import Ledger

        ledger = Ledger(Recipe(steps=200, units=4, lag=1, evaluate_every=10))
        ledger.publish(200)
        while (unit := ledger.lease("worker", 0.0)) is not None:
            ledger.complete(unit)
