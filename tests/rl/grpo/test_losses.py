"""Each loss equals the formula of its paper, and each kernel torch's ops; padding, order and splits change nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.rl.config.run_config import Algorithm, Objective
from holdfast.rl.data.episode import MOST_REWARD, Prompt
from holdfast.rl.grpo import loss as grpo
from holdfast.rl.grpo import token_logprobs as dispatch
from holdfast.rl.grpo.batch import BatchColumns, advantages, collate
from holdfast.rl.grpo.token_logprobs import LEAST, eager_token_logprobs, token_logprobs
from support.programs.forked_programs import run_python
from support.rl.kernel_programs import compare
from support.rl.small_batches import episode, group_of, objective
from support.source_tree import TESTS
from support.weights.peers import site_of

OBJECTIVES = [
    *map(objective, get_args(Algorithm)),
    objective("grpo", kl=0.04, entropy=0.01),
    objective("dapo", truncation=1.5),
    objective("gspo", truncation=1.1),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(grpo.LossInputs):
    """What a loss takes beside the new policy's log-probabilities, a row for each sequence."""

    old: torch.Tensor


def loss(logprobs: torch.Tensor, inputs: Rows, chosen: Objective) -> torch.Tensor:
    return grpo.loss(logprobs, inputs.old, inputs, chosen)


def named(value: Objective) -> str:
    return f"{value.algorithm}{'+kl' * bool(value.kl)}{'+tis' * bool(value.truncation)}"


def sequences(seed: int, count: int = 6, longest: int = 5) -> tuple[torch.Tensor, Rows]:
    """Log-probabilities and inputs of `count` random sequences, with holes in their masks, in double precision."""
    random = torch.Generator().manual_seed(seed)

    def draw(spread: float) -> torch.Tensor:
        return spread * torch.randn(count, longest, generator=random, dtype=torch.float64)

    lengths = torch.randint(1, longest + 1, (count, 1), generator=random)
    mask = torch.arange(longest).expand(count, -1) < lengths
    mask = mask & ((draw(1.0) > -1.0) | (torch.arange(longest) == 0))
    logprobs = -draw(1.0).abs()
    signal = torch.randn(count, generator=random, dtype=torch.float64)
    generated = logprobs + draw(0.3)
    rows = mask, signal, generated, (count, int(mask.sum()))
    return logprobs, Rows(*rows, old=generated + draw(0.2), reference=logprobs + draw(0.5), entropies=draw(1.0).abs())


def by_the_papers(logprobs: torch.Tensor, inputs: Rows, chosen: Objective) -> float:
    """GRPO eq. 3 and 4, Dr. GRPO eq. 2 (no std, no 1/|o|), DAPO eq. 8, GSPO eq. 5 and 7: the negated objective."""
    assert inputs.reference is not None and inputs.entropies is not None
    objectives, tokens = [], 0
    for i, row in enumerate(inputs.mask):
        places = [t for t in range(len(row)) if row[t]]
        tokens += len(places)
        new, old, generated, reference = (
            [float(values[i, t]) for t in places]
            for values in (logprobs, inputs.old, inputs.generated, inputs.reference)
        )
        advantage = float(inputs.advantages[i])
        mean_change = sum(a - b for a, b in zip(new, old, strict=True)) / len(places)
        mean_drift = sum(a - b for a, b in zip(old, generated, strict=True)) / len(places)
        terms = []
        for k, t in enumerate(places):
            ratio = math.exp(mean_change if chosen.algorithm == "gspo" else new[k] - old[k])
            clipped = min(max(ratio, 1 - chosen.clip_low), 1 + chosen.clip_high)
            term = min(ratio * advantage, clipped * advantage)
            if chosen.truncation:
                drift = math.exp(mean_drift if chosen.algorithm == "gspo" else old[k] - generated[k])
                term *= min(drift, chosen.truncation)
            k3 = math.exp(reference[k] - new[k]) - (reference[k] - new[k]) - 1
            terms.append(term - chosen.kl * k3 + chosen.entropy * float(inputs.entropies[i, t]))
        objectives.append((sum(terms), len(places)))
    if chosen.algorithm in ("grpo", "gspo"):
        return -sum(total / length for total, length in objectives) / len(objectives)
    if chosen.algorithm == "dr_grpo":
        return -sum(total for total, _ in objectives) / len(objectives)
    return -sum(total for total, _ in objectives) / tokens


@pytest.mark.parametrize("chosen", OBJECTIVES, ids=named)
@given(seed=st.integers(0, 10_000))
def test_a_loss_equals_its_paper_and_is_the_sum_of_its_units(chosen: Objective, seed: int) -> None:
    logprobs, inputs = sequences(seed)
    whole = float(loss(logprobs, inputs, chosen))
    assert whole == pytest.approx(by_the_papers(logprobs, inputs, chosen), rel=1e-9, abs=1e-12)
    units = [loss(logprobs[part], rows(inputs, part), chosen) for part in (slice(0, 2), slice(2, None))]
    assert float(sum(units)) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("chosen", OBJECTIVES, ids=named)
def test_gradients_equal_finite_differences(chosen: Objective) -> None:
    logprobs, inputs = sequences(3)
    free = logprobs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(free, inputs, chosen), free)
    step = 1e-6
    for place in torch.cartesian_prod(*(torch.arange(size) for size in logprobs.shape)).tolist():
        moved = torch.zeros_like(logprobs)
        moved[tuple(place)] = step
        ahead, behind = (float(loss(logprobs + sign * moved, inputs, chosen)) for sign in (1, -1))
        assert float(gradient[tuple(place)]) == pytest.approx((ahead - behind) / (2 * step), rel=1e-4, abs=1e-7)


def changed(inputs: Rows, change: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
    """The same with a change of each tensor."""
    values = {each.name: getattr(inputs, each.name) for each in dataclasses.fields(inputs)}
    return dataclasses.replace(inputs, **{name: change(v) for name, v in values.items() if name != "totals"})


def rows(inputs: Rows, index: Any) -> Rows:
    return changed(inputs, lambda values: values[index])


def single(logprobs: torch.Tensor, inputs: Rows) -> tuple[torch.Tensor, Rows]:
    return logprobs.float(), changed(inputs, lambda values: values if values is inputs.mask else values.float())


def gradient_of(logprobs: torch.Tensor, inputs: Rows, chosen: Objective) -> torch.Tensor:
    free = logprobs.clone().requires_grad_()
    return torch.autograd.grad(loss(free, inputs, chosen), free)[0]


@pytest.mark.parametrize("chosen", OBJECTIVES, ids=named)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5), padding=st.integers(1, 40))
def test_splits_order_and_padding_change_no_bit_of_a_gradient(
    chosen: Objective, seed: int, cut: int, padding: int
) -> None:
    """So sums over units, which are exact, give the same step whatever the units are."""
    logprobs, inputs = single(*sequences(seed))
    whole = gradient_of(logprobs, inputs, chosen)
    parts = [gradient_of(logprobs[part], rows(inputs, part), chosen) for part in (slice(0, cut), slice(cut, None))]
    assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(len(logprobs), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(gradient_of(logprobs[order], rows(inputs, order), chosen), whole[order])

    def padded(values: torch.Tensor) -> torch.Tensor:
        filling = torch.zeros(len(values), padding).to(values.dtype)
        return torch.cat([values, filling if values.dtype == torch.bool else filling + math.nan], 1)

    wide = changed(inputs, lambda values: values if values is inputs.advantages else padded(values))
    assert torch.equal(gradient_of(padded(logprobs), wide, chosen)[:, : logprobs.shape[1]], whole)


@given(rewards=st.lists(st.floats(-100, 100), min_size=2, max_size=16), seed=st.integers(0, 99))
def test_advantages_depend_on_no_order_and_are_centred(rewards: list[float], seed: int) -> None:
    for chosen in (objective("grpo"), objective("dr_grpo"), objective("grpo", scale_rewards="batch")):
        found = advantages([rewards], chosen)
        order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed)).tolist()
        assert advantages([[rewards[place] for place in order]], chosen) == tuple(found[place] for place in order)
        assert math.fsum(found) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_scaled_as_trls_option_of_the_same_name_scales_them(scale: str) -> None:
    """Written as TRL's GRPOTrainer has it: torch's unbiased deviation of a group, or of all groups together."""
    groups = torch.tensor([[1.0, 0.0, 0.5], [0.1, 0.2, 0.9], [0.3, 0.3, 0.3]], dtype=torch.float64)
    centred = groups - groups.mean(1, keepdim=True)
    deviations = {"group": groups.std(1, keepdim=True), "batch": groups.std(), "none": torch.tensor(1.0 - 1e-4)}
    wanted = centred / (deviations[scale] + 1e-4)
    found = advantages(groups.tolist(), objective("grpo", scale_rewards=scale))
    assert found == pytest.approx(wanted.flatten().tolist(), abs=1e-9)
    assert found[6:] == (0.0, 0.0, 0.0)


@given(st.lists(st.floats(-MOST_REWARD, MOST_REWARD), min_size=2, max_size=6))
@example([MOST_REWARD, -MOST_REWARD])
def test_advantages_are_finite_in_single_precision(rewards: list[float]) -> None:
    for chosen in map(objective, get_args(Algorithm)):
        assert torch.tensor(advantages([rewards], chosen), dtype=torch.float32).isfinite().all()


@pytest.mark.parametrize("chosen", OBJECTIVES, ids=named)
@given(apart=st.sampled_from([25.0, 200.0, 1e6, math.inf]), sign=st.sampled_from([-1, 1]), seed=st.integers(0, 99))
def test_extreme_log_ratios_give_finite_losses_and_gradients(
    chosen: Objective, apart: float, sign: int, seed: int
) -> None:
    """Of the new policy to the old one, of that to the generator, of the reference to the new one."""
    logprobs, inputs = single(*sequences(seed))
    for name in ("old", "generated", "reference"):
        moved = dataclasses.replace(inputs, **{name: getattr(inputs, name) + sign * apart})
        assert loss(logprobs, moved, chosen).isfinite()
        assert gradient_of(logprobs, moved, chosen).isfinite().all()


def test_episodes_become_rows_whose_columns_predict_the_next_token() -> None:
    prompt = Prompt(number=0, tokens=(7, 8))
    masked = episode(prompt, (1, 2, 3), 1.0, mask=(True, False, True), logprobs=(-1.0, 0.0, -3.0))
    group = group_of(masked, episode(prompt, (4,), 0.0))
    made = collate(BatchColumns.of([group]), objective("dr_grpo"))
    assert made.tokens.tolist() == [[7, 8, 1, 2, 3], [7, 8, 4, 0, 0]]
    assert made.attention.sum(1).tolist() == [5, 3]
    assert made.inputs.mask.tolist() == [[False, True, False, True], [False, True, False, False]]
    assert made.inputs.generated[0].tolist() == [0.0, -1.0, 0.0, -3.0]
    assert made.inputs.advantages.tolist() == [0.5, -0.5]
    assert made.inputs.totals == (2, 3)
    moved = made.inputs.to(torch.device("meta"))
    assert moved.mask.is_meta and moved.advantages.is_meta and moved.generated.is_meta and moved.reference is None


def test_dapo_leaves_overlong_completions_out_of_the_loss_but_not_of_the_comparison() -> None:
    prompt = Prompt(number=0, tokens=(7,))
    group = group_of(episode(prompt, (1, 2), 1.0), episode(prompt, (3, 4), 0.0, finish="length"))
    made = collate(BatchColumns.of([group]), objective("dapo"))
    assert made.inputs.mask.sum(1).tolist() == [2, 0]
    assert made.inputs.advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-3)
    assert made.inputs.totals[1] == 2


BOUNDS = {"gradient of float16 logits": 2**-10, "gradient of bfloat16 logits": 2**-7}
"""A unit in the last place of the dtype of the logits; everything else is float32."""
FLOAT32_BOUND = 1e-5


def check_errors(errors: dict[str, float]) -> None:
    assert len(errors) == 5
    assert not {name: error for name, error in errors.items() if error > BOUNDS.get(name, FLOAT32_BOUND)}


def run_program(*arguments: str, packages: tuple[str, ...], **environment: str) -> Any:
    """What a program of `kernel_programs` prints, in a process that can import some packages."""
    sites = [site_of(package) for package in packages]
    if None in sites:
        pytest.skip(f"needs {' and '.join(packages)}: make peers")
    path = os.pathsep.join([str(TESTS), *filter(None, [*sites, os.environ.get("PYTHONPATH")])])
    program = ("-W", "error::RuntimeWarning", "-m", "support.rl.kernel_programs")
    return json.loads(run_python(*program, *arguments, environ=os.environ | environment | {"PYTHONPATH": path}))


@pytest.mark.timeout(320)
@pytest.mark.parametrize("language", ["triton", pytest.param("helion", marks=pytest.mark.thorough)])
def test_fused_kernels_compute_what_torchs_ops_do(language: str) -> None:
    """In the interpreter of the language, on CPU memory. The two refuse each other, so each has a process."""
    packages = ("triton",) if language == "triton" else ("triton", "helion")
    check_errors(run_program("compare", language, packages=packages, **{f"{language.upper()}_INTERPRET": "1"}))


@pytest.mark.thorough
@pytest.mark.timeout(320)
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """Triton's for an H100 down to machine code; Helion's to Triton, with its configuration."""
    assert len(run_program("compile", packages=("triton", "helion"), TRITON_CACHE_DIR=str(tmp_path))) == 4


def test_the_cpu_and_double_precision_get_torchs_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits that these formulas had before there was a choice."""
    monkeypatch.setattr(dispatch, "LEAST", 0)
    logits, tokens = torch.randn(4, 3, 11), torch.randint(0, 11, (4, 3))
    predicted = (logits.float() / 0.7).log_softmax(-1)
    chosen, entropies = token_logprobs(logits, tokens, 0.7, entropies=True)
    assert torch.equal(chosen, predicted.gather(2, tokens.unsqueeze(2)).squeeze(2))
    assert entropies is not None
    assert torch.equal(entropies, -(predicted.exp() * predicted).sum(-1))
    assert token_logprobs(logits, tokens)[1] is None


def test_large_calls_on_cuda_are_handed_to_the_fused_kernels_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 3)
    assert dispatch.fused_kernels(cpu, 1 << 30) is None
    assert dispatch.fused_kernels(gpu, dispatch.LEAST - 1) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dispatch.fused_kernels(gpu, 1 << 30) is None

    kernels = SimpleNamespace(logprobs_forward=lambda logits, *_: (logits[:, 0],) * 3)
    monkeypatch.setattr(dispatch, "fused_kernels", lambda _, elements: kernels if elements >= 8 else None)
    for rows, dtype, fused in ((4, torch.float32, True), (3, torch.float32, False), (4, torch.float64, False)):
        logits, tokens = torch.rand(rows, 2, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
        wanted = logits[:, 0] if fused else eager_token_logprobs(logits, tokens, 1.0, entropies=False)[0]
        assert torch.equal(token_logprobs(logits, tokens)[0], wanted)


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    return pytest.mark.gpu(needs(test))


@on_gpu
@pytest.mark.parametrize("language", ["triton", "helion"])
def test_gpu_fused_kernels_compute_what_torchs_ops_do(language: str) -> None:
    pytest.importorskip(language, reason=f"needs {language}")
    check_errors(compare(language, "cuda"))


@on_gpu
def test_gpu_the_dispatch_takes_a_fused_kernel_for_a_large_call_and_its_gradient_is_torchs() -> None:
    pytest.importorskip("triton", reason="needs triton: make peers")
    logits = (3 * torch.randn(2, 64, 9001, device="cuda")).requires_grad_()
    assert logits.numel() > LEAST
    tokens = torch.randint(0, 9001, (2, 64), device="cuda")
    found = []
    for call in (token_logprobs, eager_token_logprobs):
        chosen, entropies = call(logits, tokens, 0.9, entropies=True)
        (gradient,) = torch.autograd.grad((chosen - entropies).sum(), logits)
        found.append((chosen.detach(), entropies.detach(), gradient))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[0][2], found[1][2]), "two implementations were compared"
