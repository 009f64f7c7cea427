"""Names the modules that the processes of a run share one import of; imports none of them."""

from __future__ import annotations

PRELOAD = (
    "transformers.models.llama.modeling_llama",
    "holdfast.rl.actors.engine",
    "holdfast.rl.trainers.trainer_actor",
    "holdfast.rl.generators.transformers_generator",
    "holdfast.rl.run.weight_holder",
    "holdfast.rl.run.environment_servers",
)
"""What trainers, generators, holders and environment servers import."""

DRIVER = "holdfast.harness.training.driver"
"""What the driver of a scenario imports, which is a fork too."""
