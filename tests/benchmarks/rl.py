"""Reinforcement learning: a batch of completions, the gradient of a step, and the bookkeeping of the replay buffer."""

from __future__ import annotations

from typing import Any


class PolicyStep:
    """Seconds for 32 prompts in groups of 8 on the small policy, one thread."""

    rounds = 1
    repeat = (5, 20, 2.0)
    timeout = 120

    def setup(self) -> None:
        import torch

        from holdfast.rl.config.run_config import RunConfig, Sampling
        from holdfast.rl.data.episode import Completion, SamplingRequest
        from holdfast.rl.data.prompts import CharacterTokenizer, PromptSource, arithmetic_training
        from holdfast.rl.generators.models import ModelSource
        from holdfast.rl.generators.transformers_generator import ContinuousBatch, RunningRequest
        from holdfast.rl.run.policy import SMALL_LLAMA
        from holdfast.rl.trainers.policy import PolicyLoss, build_policy

        if hasattr(self, "generate"):
            return
        torch.set_num_threads(1)
        config, model = RunConfig(), ModelSource(config=SMALL_LLAMA, seed=0)
        source = PromptSource(arithmetic_training(), CharacterTokenizer(), 0, "arithmetic")
        sampling = Sampling(group=8, max_new_tokens=2)
        prompts = [source.prompt(number) for number in range(32)]
        request = SamplingRequest(
            prompts=tuple(each.tokens for each in prompts),
            samples=8,
            seeds=tuple(range(256)),
            max_new_tokens=2,
            temperature=1.0,
        )
        self.policy = build_policy(model, config.model)
        self.loss = PolicyLoss(config, model)

        def generate() -> list[Completion]:
            drawn = list[Completion]()
            batch = ContinuousBatch.of(RunningRequest(request, drawn.extend))
            while batch.busy:
                batch.step(self.policy, 0)
            return drawn

        self.generate = generate
        self.update = _update(prompts, self.generate(), sampling.group, config.objective)
        self.parameters = list(self.policy.parameters())

    def time_generate(self) -> None:
        self.generate()

    def time_gradient(self) -> None:
        self._gradient()

    def peakmem_gradient(self) -> None:
        self._gradient()

    def _gradient(self) -> None:
        import torch

        for forward in self.update.shard(0, 1, 0):
            torch.autograd.grad(self.loss.of(self.policy, forward), self.parameters)


def _update(prompts: Any, completions: Any, size: int, objective: Any) -> Any:
    """The tokens of an update; every second completion of a group is right."""
    from holdfast.rl.data.episode import Episode, Group
    from holdfast.rl.grpo.batch import BatchColumns, updates_of

    groups = []
    for number, prompt in enumerate(prompts):
        episodes = tuple(
            Episode(
                prompt=prompt,
                tokens=each.tokens,
                logprobs=each.logprobs,
                versions=each.versions,
                mask=(True,) * len(each.tokens),
                reward=float(place % 2),
                finish=each.finish,
            )
            for place, each in enumerate(completions[number * size : (number + 1) * size])
        )
        groups.append(Group(number=number, prompt=prompt, episodes=episodes))
    (update,) = updates_of(BatchColumns.of(groups), 1, objective)
    return update


class Bookkeeping:
    """Seconds to begin, finish, take and commit the groups of 50 batches."""

    def time_batches(self) -> None:
        from holdfast.rl.data.replay_buffer import BufferState, StalenessRule

        state = BufferState(rule=StalenessRule(groups=32, bound=1))
        for batch in range(50):
            while (begun := state.begin()) is not None:
                state, permit = begun
                state = state.finish(_group(permit.number, permit.version))
            taken = state.take(batch)
            assert taken is not None
            state = taken.commit().serve(batch + 1)


def _group(number: int, version: int) -> Any:
    from holdfast.rl.data.episode import Episode, Group, Prompt

    prompt = Prompt(number=number, tokens=(1, 2))
    episode = Episode(
        prompt=prompt, tokens=(3,), logprobs=(-1.0,), versions=(version,), mask=(True,), reward=1.0, finish="stop"
    )
    return Group(number=number, prompt=prompt, episodes=(episode, episode))
