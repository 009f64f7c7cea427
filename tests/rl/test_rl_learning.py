"""Task, model, generation and loss are pure functions: equal inputs give equal bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData
from holdfast.rl.learning import generate, grpo, model, task, warmup
from holdfast.rl.learning.recipe import Recipe, seed_of
from holdfast.rl.roles import wire

RECIPE = Recipe(seed=3, prompts=4, group=4, units=2)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_split_is_by_multiset_and_complete() -> None:
    def multisets(problems: task.Problems) -> set[tuple[str, ...]]:
        return {tuple(sorted(task.decode(prompt)[:5:2])) for prompt in problems.prompts.tolist()}

    assert (len(task.training()), len(task.held_out())) == (796, 204)
    assert not multisets(task.training()) & multisets(task.held_out())
    assert len(multisets(task.training()) | multisets(task.held_out())) == 220


def test_every_answer_is_the_sum() -> None:
    for problems in (task.training(), task.held_out()):
        for prompt, answer in zip(problems.prompts.tolist(), problems.answers.tolist(), strict=True):
            first, second, third = task.decode(prompt).rstrip("=").split("+")
            assert task.decode(answer) == f"{int(first) + int(second) + int(third):02d}"


def test_the_reward_is_for_both_characters_or_nothing() -> None:
    answers = torch.tensor([task.encode("20")] * 4)
    samples = torch.tensor([task.encode(text) for text in ("20", "21", "10", "02")])
    assert task.reward(samples, answers).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_a_model_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = model.build(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert model.digest(model.build(5)) == model.digest(first) != model.digest(model.build(6))
    assert sum(parameter.numel() for parameter in first.parameters()) == model.PARAMETERS


def test_a_unit_is_a_pure_function_of_its_name_and_the_weights() -> None:
    policy = model.build(0)
    one = wire.pack_samples(generate.generate(policy, RECIPE, 7, 1))
    torch.rand(3)
    assert wire.pack_samples(generate.generate(policy, RECIPE, 7, 1)) == one
    assert wire.pack_samples(generate.generate(policy, RECIPE, 7, 0)) != one
    assert wire.pack_samples(generate.generate(policy, RECIPE, 8, 1)) != one
    assert wire.pack_samples(generate.generate(model.build(1), RECIPE, 7, 1)) != one


def test_a_gradient_does_not_depend_on_which_copy_of_the_model_computes_it() -> None:
    samples = generate.generate(model.build(0), RECIPE, 0, 0)
    again = wire.unpack_samples(wire.pack_samples(samples), RECIPE.unit_samples)
    assert torch.equal(grpo.gradient(model.build(0), samples, RECIPE), grpo.gradient(model.build(0), again, RECIPE))


def test_advantages_compare_the_samples_of_one_prompt() -> None:
    values = grpo.advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), 3)
    assert values[0] > 0 > values[1] == values[2]
    assert values[3:6].mean().abs() < 1e-6
    assert values[6:].tolist() == [0.0, 0.0, 0.0]


def test_reinforcement_makes_rewarded_samples_likelier() -> None:
    policy = model.build(0)
    optimizer = grpo.optimizer(policy, RECIPE)
    samples = generate.generate(policy, RECIPE, 0, 0)
    rewards = (samples.tokens[:, 0] == samples.tokens[0, 0]).float()
    samples = generate.Samples(samples.prompts, samples.tokens, samples.logprobs, rewards)

    def share() -> float:
        logits = model.last_logits(policy, samples.prompts, 1)[:, 0]
        return float(logits.softmax(-1)[:, samples.tokens[0, 0]].mean().detach())

    before = share()
    for _ in range(8):
        grpo.update(policy, optimizer, grpo.gradient(policy, samples, RECIPE), RECIPE, step=RECIPE.rate_warmup)
    assert share() > before


def test_the_warm_up_is_the_same_everywhere() -> None:
    policies = [model.build(0), model.build(0)]
    recipe = Recipe(warmup_steps=3, warmup_batch=32)
    losses = [warmup.warm_up(policy, recipe) for policy in policies]
    assert losses[0] == losses[1]
    assert model.digest(policies[0]) == model.digest(policies[1]) != model.digest(model.build(0))


def test_held_out_prompts_are_never_generated_from() -> None:
    held_out = {tuple(prompt) for prompt in task.held_out().prompts.tolist()}
    policy = model.build(0)
    for step in range(20):
        prompts = generate.generate(policy, Recipe(), step, 0).prompts.tolist()
        assert not held_out & {tuple(prompt) for prompt in prompts}


@given(st.lists(st.integers(0, 2**40) | st.text(max_size=3), min_size=1, max_size=4))
def test_seeds_fit_a_torch_generator_and_depend_on_every_part(parts: list[int | str]) -> None:
    seed = seed_of(*parts)
    torch.Generator().manual_seed(seed)
    assert seed == seed_of(*parts)
    assert seed != seed_of(*parts, 0)


def test_malformed_samples_are_refused() -> None:
    samples = generate.generate(model.build(0), RECIPE, 0, 0)
    packed = wire.pack_samples(samples)
    with pytest.raises(CorruptData, match="bytes where"):
        wire.unpack_samples(packed, RECIPE.unit_samples + 1)
    with pytest.raises(CorruptData, match="not a"):
        wire.unpack_samples(packed[:-1], RECIPE.unit_samples)
    wild = generate.Samples(samples.prompts + 100, samples.tokens, samples.logprobs, samples.rewards)
    with pytest.raises(CorruptData, match="vocabulary"):
        wire.unpack_samples(wire.pack_samples(wild), RECIPE.unit_samples)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"group": 1}, {"lag": -1}, {"seed": -1}, {"units": 0}])
def test_a_recipe_that_cannot_work_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Recipe(**wrong)
