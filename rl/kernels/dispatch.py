"""Chooses the kernels for a call: torch's ops on the CPU and for small calls, Triton's or Helion's on CUDA."""

from __future__ import annotations

import torch

from holdfast.comms.tensors.kernel_choice import Implementation, KernelChoice
from holdfast.rl.kernels import eager, fused
from holdfast.rl.kernels.loss_form import LossForm, LossInputs

Tensor = torch.Tensor

LEAST = 1 << 20
"""Elements from which a fused kernel serves a call on CUDA.

On an H200, torch's ops take as long there for log-probabilities, and longer from 2^22 on. Smaller calls are not worth
the second that a process needs to compile a kernel.
"""

FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _triton() -> fused.FusedKernels:
    from holdfast.rl.kernels import triton_kernels

    return triton_kernels


def _helion() -> fused.FusedKernels:
    from holdfast.rl.kernels import helion_kernels

    return helion_kernels


CHOICE = KernelChoice[fused.FusedKernels | None](
    Implementation(_triton, "cuda", "triton", LEAST),
    Implementation(_helion, "cuda", "helion", LEAST),
    Implementation(lambda: None),
)
"""None: torch's ops."""


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, *, entropies: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The log-probabilities of `tokens` (...) under `logits` (..., vocabulary) over `temperature`, in float32.

    With `entropies` also those of the distributions, else None.
    """
    kernels = _for(logits)
    if kernels is None:
        return eager.token_logprobs(logits, tokens, temperature, entropies=entropies)
    return fused.token_logprobs(kernels, logits, tokens, temperature, entropies=entropies)


def policy_loss(logprobs: Tensor, inputs: LossInputs, form: LossForm) -> Tensor:
    """The loss of sequences by `form`; `logprobs` (n, length) are the new policy's."""
    kernels = _for(logprobs)
    if kernels is None:
        return eager.policy_loss(logprobs, inputs, form)
    return fused.policy_loss(kernels, logprobs, inputs, form)


def _for(tensor: Tensor) -> fused.FusedKernels | None:
    return CHOICE.of(tensor.device, tensor.numel()) if tensor.dtype in FUSED_DTYPES else None
