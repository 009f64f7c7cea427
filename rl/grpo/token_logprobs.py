"""`token_logprobs`: log-probabilities of tokens, by torch's ops, or by a fused kernel for large calls on CUDA.

The kernels read logits of float32, float16 or bfloat16, and compute in float32. Their forward keeps the logits and
three numbers a row; log_softmax over the vocabulary is never in memory.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor

LEAST = 1 << 20
"""Elements from which the fused kernel serves a call on CUDA.

On an H200, torch's ops take as long there, and longer from 2^22 on. Smaller calls are not worth the second that a
process needs to compile a kernel.
"""

FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fused_kernels(device: torch.device, elements: int) -> ModuleType | None:
    """Triton's for large calls on CUDA, where it is installed; None: torch's ops."""
    if device.type != "cuda" or elements < LEAST or importlib.util.find_spec("triton") is None:
        return None
    from holdfast.rl.grpo import triton_logprobs

    return triton_logprobs


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, *, entropies: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The log-probabilities of `tokens` (...) under `logits` (..., vocabulary) over `temperature`, in float32.

    With `entropies` also those of the distributions, else None.
    """
    kernels = fused_kernels(logits.device, logits.numel()) if logits.dtype in FUSED_DTYPES else None
    if kernels is None:
        return eager_token_logprobs(logits, tokens, temperature, entropies=entropies)
    return fused_token_logprobs(kernels, logits, tokens, temperature, entropies=entropies)


def eager_token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float, *, entropies: bool
) -> tuple[Tensor, Tensor | None]:
    """`token_logprobs` by torch's ops: the reference, in any dtype and on any device."""
    predicted: Any = (logits.float() / temperature).log_softmax(-1)
    chosen = predicted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen, -(predicted.exp() * predicted).sum(-1) if entropies else None


def fused_token_logprobs(
    kernels: ModuleType, logits: Tensor, tokens: Tensor, temperature: float, *, entropies: bool
) -> tuple[Tensor, Tensor | None]:
    """`token_logprobs` by fused kernels, with their gradient. `kernels` has the two functions of `triton_logprobs`."""
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    call: Any = _TokenLogprobs.apply
    chosen, entropy = call(rows, tokens.reshape(-1).contiguous(), temperature, kernels)
    return chosen.view(tokens.shape), entropy.view(tokens.shape) if entropies else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: Tensor, tokens: Tensor, temperature: float, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        chosen, normaliser, entropy = kernels.logprobs_forward(logits, tokens, temperature)
        context.save_for_backward(logits, tokens, normaliser, entropy)
        context.temperature, context.kernels = temperature, kernels
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, normaliser, entropy = context.saved_tensors
        gradient = context.kernels.logprobs_backward(
            logits,
            tokens,
            context.temperature,
            normaliser,
            entropy,
            of_logprobs.contiguous(),
            of_entropies.contiguous(),
        )
        return gradient, None, None, None
