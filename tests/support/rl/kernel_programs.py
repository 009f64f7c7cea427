"""Programs over the kernels of `holdfast.rl`, for processes of their own: an interpreter is chosen before an import.

`compare triton|helion` prints the largest errors against torch's ops, as JSON; `compile` prints what was compiled.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from holdfast.rl.grpo.token_logprobs import eager_token_logprobs, fused_token_logprobs
from support.source_tree import ROOT

Tensor = torch.Tensor

SHAPES = (
    (5, 14, torch.float32),
    (2, 2048, torch.float32),
    (3, 2049, torch.bfloat16),
    (3, 4100, torch.float16),
)


def kernels_in(language: str) -> ModuleType:
    """The product's module of Triton kernels, or the example of Helion's."""
    if language == "triton":
        return importlib.import_module("holdfast.rl.grpo.triton_logprobs")
    sys.path.insert(0, str(ROOT / "examples/stack/helion"))
    return importlib.import_module("token_logprobs")


def compare(language: str, device: str = "cpu") -> dict[str, float]:
    """The largest error of each result, relative where the number is larger than 1."""
    largest: dict[str, float] = {}
    for name, found, wanted in logprob_cases(kernels_in(language), device):
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
            for call in (eager_token_logprobs, partial(fused_token_logprobs, kernels)):
                free = logits.clone().requires_grad_()
                chosen, entropy = call(free, tokens, 0.7, entropies=entropies)
                entropy = torch.zeros(rows, device=device) if entropy is None else entropy
                (gradient,) = torch.autograd.grad((chosen * weights[0] + entropy * weights[1]).sum(), free)
                results.append((chosen.detach(), entropy.detach(), gradient))
            names = "logprobs", "entropies", f"gradient of {str(dtype).removeprefix('torch.')} logits"
            yield from zip(names, results[1], results[0], strict=True)


def compile_all() -> list[str]:
    """Compile every Triton kernel for an H100, and generate Triton code of every Helion kernel by its configuration."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = kernels_in("triton")
    done = []
    for name in ("logprob_rows", "logprob_gradient_rows"):
        kernel = getattr(kernels, name)
        others = {"temperature": "fp32", "tokens": "*i64", "vocabulary": "i32", "block": "constexpr"}
        others |= dict.fromkeys(("logits", "gradient"), "*bf16")
        types = {each: others.get(each, "*fp32") for each in kernel.arg_names}
        block = {(kernel.arg_names.index("block"),): kernels.VOCABULARY_BLOCK}
        made = triton.compile(ASTSource(kernel, types, constexprs=block), target=GPUTarget("cuda", 90, 32))
        assert "cubin" in made.asm
        done.append(f"triton {name}")
    row, logits, tokens = torch.rand(8), torch.rand(8, 4096), torch.zeros(8, dtype=torch.int64)
    helion = kernels_in("helion")
    for name, given in (("logprob_rows", ()), ("logprob_gradient_rows", (row, row, row, row))):
        assert getattr(helion, name).bind((logits, tokens, 0.7, *given)).to_triton_code(helion.CONFIG)
        done.append(f"helion {name}")
    return done


if __name__ == "__main__":
    command, *names = sys.argv[1:]
    print(json.dumps(compare(names[0]) if command == "compare" else compile_all()))
