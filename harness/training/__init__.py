"""Trains by reinforcement learning, and shows a run: its progress, its report, its episodes."""

from __future__ import annotations

PRELOAD = (
    "transformers.models.llama.modeling_llama",
    "holdfast.rl.actors.engine",
    "holdfast.rl.trainers.trainer_actor",
    "holdfast.rl.generators.transformers_generator",
    "holdfast.rl.run.generation",
    "holdfast.rl.run.environment_servers",
)
"""What trainers, generators, holders and environment servers share one import of. Nothing is imported here."""

DRIVER = "holdfast.harness.training.driver"
"""What the driver of a scenario imports, which is a fork too."""
