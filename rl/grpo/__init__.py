"""Group-relative policy optimisation: `loop` (both loops and an episode), `loss`, `batch`, and `token_logprobs`."""
