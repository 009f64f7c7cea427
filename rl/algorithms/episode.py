"""One episode: sample a prompt, generate, evaluate, add."""

from __future__ import annotations

from holdfast.rl.algorithms.protocols import Buffer, Data, Evaluator, Policy
from holdfast.rl.config.sampling import Sampling
from holdfast.rl.data.episode import Group
from holdfast.rl.data.replay_buffer import FailedGroup


async def generate_episode(
    data: Data, policy: Policy, reward: Evaluator, buffer: Buffer, sampling: Sampling, seed: int, redraws: int = 0
) -> None:
    """Add the group of the next prompt to the buffer.

    While all its rewards are equal it teaches nothing, and is drawn again, at most `redraws` times (DAPO).
    """
    prompt = await data.sample()
    for draw in range(redraws + 1):
        request = sampling.request(seed, prompt, draw, buffer.required_version)
        completions = await policy.generate.route(request)
        group = await reward.evaluate(prompt, completions)
        if teaches(group):
            break
    await buffer.add(group)


def teaches(group: Group | FailedGroup) -> bool:
    """Whether another draw could not be better: the rewards differ, or there are none."""
    return isinstance(group, FailedGroup) or len({each.reward for each in group.episodes}) > 1
