"""Small models and what they draw, episodes to train them on, and the configuration of their trainers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from holdfast.rl.config.run_config import PRESETS, Algorithm, Objective, RunConfig
from holdfast.rl.data.episode import Completion, Episode, Finish, Group, Prompt
from holdfast.rl.data.replay_buffer import Batch, BufferState, StalenessRule
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.batch import EncodedBatch


def tiny_llama(words: int, layers: int = 1, positions: int = 32) -> ModelSource:
    """A model with random weights that knows so many tokens."""
    sizes = {"vocab_size": words, "num_hidden_layers": layers, "max_position_embeddings": positions}
    heads = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return ModelSource(config={"model_type": "llama", **sizes, **heads})


@torch.no_grad()
def full_logprobs(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> torch.Tensor:
    """The log-probs of tokens after a prompt by one forward pass over all of them, without a cache."""
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


@torch.no_grad()
def likeliest_tokens(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """So many tokens after a prompt, each the likeliest one, without a cache."""
    tokens = prompt
    for _ in range(count):
        tokens += (int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()),)
    return tokens[len(prompt) :]


def objective(algorithm: Algorithm, **fields: object) -> Objective:
    """The objective of an algorithm, with `fields` instead of its defaults."""
    return msgspec.convert({**PRESETS[algorithm], **fields, "algorithm": algorithm}, Objective)


def trainer_config(
    strategy: str,
    batches: int,
    *,
    objective: Objective = Objective(),  # noqa: B008  (frozen)
    updates: int = 1,
    temperature: float = 1.0,
    lora_rank: int = 0,
    checkpoint_every: int = 10,
    **trainer: object,
) -> RunConfig:
    """The configuration of trainers that train on so many batches; `trainer` are fields of its section."""
    tables = {
        "steps": batches * updates,
        "algorithm": {"updates": updates},
        "sampling": {"temperature": temperature},
        "model": {"lora_rank": lora_rank},
        "checkpoint": {"every": checkpoint_every},
        "trainer": {"strategy": strategy, "rate_warmup": 1, "rate_floor": 1.0, **trainer},
    }
    return msgspec.structs.replace(msgspec.convert(tables, RunConfig), objective=objective)


def episode(prompt: Prompt, tokens: tuple[int, ...], reward: float = 1.0, version: int = 0, **fields: Any) -> Episode:
    """An episode of tokens that the policy drew with a version, unless `fields` say otherwise."""
    many = len(tokens)
    drawn: dict[str, Any] = {"logprobs": (-0.5,) * many, "versions": (version,) * many, "mask": (True,) * many}
    return Episode(prompt=prompt, tokens=tokens, reward=reward, **drawn | {"finish": "stop"} | fields)


def completion(tokens: Iterable[int], version: int = 0, finish: Finish = "stop", logprob: float = -0.5) -> Completion:
    """What a policy drew with a version."""
    drawn = tuple(tokens)
    many = len(drawn)
    return Completion(tokens=drawn, logprobs=(logprob,) * many, versions=(version,) * many, finish=finish)


def group_of(*episodes: Episode) -> Group:
    prompt = episodes[0].prompt
    return Group(number=prompt.number, prompt=prompt, episodes=episodes)


GROUPS = 3
"""The groups of a random batch, each with as many episodes."""


def random_groups(step: int, words: int = 13) -> tuple[Group, ...]:
    """Groups that are a function of a step: of different lengths, with holes in masks, and some cut off."""
    random = torch.Generator().manual_seed(step)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    groups = []
    for at in range(GROUPS):
        prompt = Prompt(number=step * GROUPS + at, tokens=tuple(draw(0, words) for _ in range(draw(1, 4))))
        episodes = []
        for member in range(GROUPS):
            count = draw(2, 6)
            episodes.append(
                episode(
                    prompt,
                    tuple(draw(0, words) for _ in range(count)),
                    logprobs=tuple(-2.5 + 0.2 * draw(-5, 5) for _ in range(count)),
                    version=step,
                    mask=(True, *(draw(0, 4) > 0 for _ in range(count - 1))),
                    reward=float(member) + 0.5 * draw(0, 2),
                    finish="length" if (at + member) % 4 == 3 else "stop",
                )
            )
        groups.append(group_of(*episodes))
    return tuple(groups)


def random_batch(step: int, updates: int = 1) -> EncodedBatch:
    """The batch of `random_groups` that begins with update `step`, as trainers get it."""
    rule = StalenessRule(groups=GROUPS, updates=updates, bound=updates)
    after = BufferState(rule=rule, batch=step // updates + 1)
    return EncodedBatch.of(Batch(step=step, groups=random_groups(step), after=after))
