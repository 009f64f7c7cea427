"""Programs over the kernels of `holdfast.rl`, for processes of their own: an interpreter is chosen before an import.

`compare triton|helion` prints the largest errors against torch's ops, as JSON; `compile` prints what was compiled.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.rl.kernels import LossForm, LossInputs, eager, fused

Tensor = torch.Tensor

SHAPES = (
    (5, 14, torch.float32),
    (2, 2048, torch.float32),
    (3, 2049, torch.bfloat16),
    (3, 4100, torch.float16),
)
FORMS = [
    LossForm(sequence, 0.2, 0.28, kl, entropy, truncation, by_length, divisor=7)
    for sequence in (False, True)
    for kl, entropy, truncation, by_length in ((0.0, 0.0, 0.0, True), (0.04, 0.01, 1.2, True), (0.1, 0.0, 1.5, False))
]


def compare(language: str, device: str = "cpu") -> dict[str, float]:
    """The largest error of each result, relative where the number is larger than 1."""
    kernels = importlib.import_module(f"holdfast.rl.kernels.{language}_kernels")
    largest: dict[str, float] = {}
    for cases in (logprob_cases(kernels, device), loss_cases(kernels, device)):
        for name, found, wanted in cases:
            assert found.shape == wanted.shape and found.dtype == wanted.dtype, name
            error = ((found.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1.0)).max()
            largest[name] = max(largest.get(name, 0.0), float(error))
    return largest


Case = tuple[str, Tensor, Tensor]


def logprob_cases(kernels: Any, device: str) -> Iterator[Case]:
    random = torch.Generator().manual_seed(0)
    for rows, vocabulary, dtype in SHAPES:
        for entropies in (False, True):
            logits = (4 * torch.randn(rows, vocabulary, generator=random)).to(dtype)
            if not entropies:
                logits[:, :3] = -math.inf
            tokens = torch.randint(4, vocabulary, (rows,), generator=random)
            weights = torch.randn(2, rows, generator=random)
            logits, tokens, weights = (each.to(device) for each in (logits, tokens, weights))
            results = []
            for call in (
                eager.token_logprobs,
                lambda *args, **options: fused.token_logprobs(kernels, *args, **options),
            ):
                free = logits.clone().requires_grad_()
                chosen, entropy = call(free, tokens, 0.7, entropies=entropies)
                entropy = torch.zeros(rows, device=device) if entropy is None else entropy
                (gradient,) = torch.autograd.grad((chosen * weights[0] + entropy * weights[1]).sum(), free)
                results.append((chosen.detach(), entropy.detach(), gradient))
            names = "logprobs", "entropies", f"gradient of {str(dtype).removeprefix('torch.')} logits"
            yield from zip(names, results[1], results[0], strict=True)


def loss_cases(kernels: Any, device: str) -> Iterator[Case]:
    random = torch.Generator().manual_seed(1)
    for length in (5, 300):
        mask = torch.rand(4, length, generator=random) > 0.3
        mask[3] = False
        outside = torch.where(mask, 0.0, math.nan)
        logprobs = -torch.randn(4, length, generator=random).abs() + outside
        near = [logprobs + 0.3 * torch.randn(4, length, generator=random) for _ in range(3)]
        entropies = (torch.rand(4, length, generator=random) + outside).to(device)
        near[2][0, mask[0]] += 30.0  # beyond the limit of log-ratios
        near[1][1, mask[1]] -= 50.0
        logprobs = logprobs.to(device)
        for old in (None, near[1]):
            inputs = LossInputs(mask, torch.randn(4, generator=random), near[0], old, near[2])
            inputs = inputs.to(torch.device(device))
            for form in FORMS:
                wanted = loss_and_gradients(eager.policy_loss, logprobs, inputs, entropies, form)
                found = loss_and_gradients(
                    lambda *args: fused.policy_loss(kernels, *args), logprobs, inputs, entropies, form
                )
                yield from zip(("loss", "gradient of logprobs", "gradient of entropies"), found, wanted, strict=True)


def loss_and_gradients(
    call: Callable[..., Tensor], logprobs: Tensor, inputs: LossInputs, entropies: Tensor, form: LossForm
) -> tuple[Tensor, ...]:
    free, information = logprobs.clone().requires_grad_(), entropies.clone().requires_grad_()
    given = LossInputs(inputs.mask, inputs.advantages, inputs.generated, inputs.old, inputs.reference, information)
    loss = call(free, given, form)
    gradients = torch.autograd.grad(3.0 * loss, (free, information), allow_unused=True)
    return loss.detach(), *(torch.zeros_like(free) if each is None else each for each in gradients)


def compile_all() -> list[str]:
    """Compile every Triton kernel for an H100, and generate Triton code of every Helion kernel by its configuration."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from holdfast.rl.kernels import helion_kernels, triton_kernels

    done = []
    numbers = dict.fromkeys(("temperature", "least", "most", "kl", "truncation", "limit"), "fp32")
    others = {**numbers, "tokens": "*i64", "mask": "*u8", **dict.fromkeys(("vocabulary", "length", "size"), "i32")}
    constants: dict[str, dict[str, Any]] = {
        "logprob_rows": {"block": triton_kernels.VOCABULARY_BLOCK},
        "logprob_gradient_rows": {"block": triton_kernels.VOCABULARY_BLOCK},
        "gain_rows": {
            "block": triton_kernels.SEQUENCE_BLOCK,
            **dict.fromkeys(("sequence_ratio", "truncated", "with_kl", "with_entropy", "by_length"), True),
        },
    }
    for name, fixed in constants.items():
        kernel = getattr(triton_kernels, name)
        types = {each: others.get(each, "*fp32") for each in kernel.arg_names} | dict.fromkeys(fixed, "constexpr")
        if "logits" in types:
            types |= {each: "*bf16" for each in ("logits", "gradient") if each in types}
        if name == "gain_rows":
            types["entropy"] = "fp32"
        source = ASTSource(
            kernel, types, constexprs={(kernel.arg_names.index(each),): value for each, value in fixed.items()}
        )
        assert "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
        done.append(f"triton {name}")
    row, logits, sequences = torch.rand(8), torch.rand(8, 4096), torch.rand(8, 512)
    tokens = torch.zeros(8, dtype=torch.int64)
    arguments: dict[str, tuple[Any, ...]] = {
        "logprob_rows": (logits, tokens, 0.7),
        "logprob_gradient_rows": (logits, tokens, 0.7, row, row, row, row),
        "gain_rows": (sequences, sequences.byte(), row, *[sequences] * 4, 0.8, 1.2, 0.1, 0.1, 2.0, 20.0, True, True),
    }
    for name, given in arguments.items():
        config = helion_kernels.configuration(name)
        assert getattr(helion_kernels, name).bind(given).to_triton_code(config)
        done.append(f"helion {name}")
    return done


if __name__ == "__main__":
    command, *names = sys.argv[1:]
    print(json.dumps(compare(names[0]) if command == "compare" else compile_all()))
