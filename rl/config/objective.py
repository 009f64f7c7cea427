"""What a policy is trained to maximise: one frozen description selects GRPO, Dr. GRPO, DAPO, GSPO or a mixture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Algorithm = Literal["grpo", "dr_grpo", "dapo", "gspo"]


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss of a step. The algorithm sets the defaults of the other fields; those here are GRPO's."""

    algorithm: Annotated[Algorithm, Meta(description="The algorithm, whose defaults the other fields have.")] = "grpo"
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        Meta(
            description="Divide advantages by the standard deviation of the rewards of their group, or of the whole "
            "batch; or not. It is the unbiased one (over n - 1), plus 1e-4, as in TRL's option of this name."
        ),
    ] = "group"
    aggregate: Annotated[
        Literal["sequence", "token", "sum"],
        Meta(
            description="Average tokens in each sequence, or over all tokens of the step; or add those of a sequence."
        ),
    ] = "sequence"
    ratio: Annotated[
        Literal["token", "sequence"], Meta(description="Importance ratios of tokens, or of whole sequences.")
    ] = "token"
    clip_low: Annotated[float, Meta(gt=0, lt=1, description="The ratio is clipped from below at 1 minus this.")] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="The ratio is clipped from above at 1 plus this.")] = 0.2
    kl: Annotated[float, Meta(ge=0, description="The weight of the distance to the reference policy (k3).")] = 0.0
    entropy: Annotated[float, Meta(ge=0, description="The weight of an entropy bonus.")] = 0.0
    truncation: Annotated[
        float,
        Meta(
            ge=0,
            description="The cap of the importance weight of the trainer's old policy against the generator; 0: the "
            "generator's log-probabilities are the old ones.",
        ),
    ] = 0.0
    redraws: Annotated[
        int, Meta(ge=0, le=100, description="How often a group whose rewards are all equal is drawn again.")
    ] = 0
    skip_overlong: Annotated[
        bool, Meta(description="Leave episodes with a completion that the limit of tokens cut out of the loss.")
    ] = False


PRESETS: Mapping[str, Mapping[str, object]] = {
    "grpo": {},
    "dr_grpo": {"scale_rewards": "none", "aggregate": "sum"},
    "dapo": {"aggregate": "token", "clip_high": 0.28, "redraws": 4, "skip_overlong": True},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
}
"""What the fields of an objective are by default, where that differs from GRPO."""


def objective(algorithm: Algorithm, **fields: object) -> Objective:
    """The objective of an algorithm, with `fields` instead of its defaults. Raises msgspec.ValidationError."""
    return msgspec.convert({**PRESETS[algorithm], **fields, "algorithm": algorithm}, Objective)
