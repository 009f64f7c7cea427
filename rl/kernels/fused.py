"""Autograd over fused kernels: Triton's and Helion's have this one interface, and this one backward.

They read logits of float32, float16 or bfloat16, and compute in float32. The forward of `token_logprobs` keeps the
logits and three numbers a row; log_softmax over the vocabulary is never in memory. The forward of `policy_loss` writes
its gradient too, since that needs what the forward has at hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from holdfast.rl.kernels.loss_form import LossForm, LossInputs

Tensor = torch.Tensor


class FusedKernels(Protocol):
    """What one language implements. Tensors are contiguous, and float32 unless it says so."""

    def logprobs_forward(self, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens' log-probabilities, the logarithms of the normalisers, and the entropies, each (rows,).

        `logits` are (rows, vocabulary) and of any of the three dtypes, `tokens` (rows,) of int64.
        """

    def logprobs_backward(
        self,
        logits: Tensor,
        tokens: Tensor,
        temperature: float,
        normaliser: Tensor,
        entropy: Tensor,
        of_logprobs: Tensor,
        of_entropies: Tensor,
    ) -> Tensor:
        """The gradient of the logits, in their dtype, from the gradients of log-probabilities and entropies."""

    def loss_forward(
        self,
        logprobs: Tensor,
        mask: Tensor,
        advantages: Tensor,
        generated: Tensor,
        old: Tensor,
        reference: Tensor,
        entropies: Tensor,
        form: LossForm,
    ) -> tuple[Tensor, Tensor]:
        """The gain of each sequence (n,), before the division by `divisor`; its gradient in `logprobs` (n, length)."""


def token_logprobs(
    kernels: FusedKernels, logits: Tensor, tokens: Tensor, temperature: float, *, entropies: bool
) -> tuple[Tensor, Tensor | None]:
    """As `eager.token_logprobs`."""
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    call: Any = _TokenLogprobs.apply
    chosen, entropy = call(rows, tokens.reshape(-1).contiguous(), temperature, kernels)
    return chosen.view(tokens.shape), entropy.view(tokens.shape) if entropies else None


def policy_loss(kernels: FusedKernels, logprobs: Tensor, inputs: LossInputs, form: LossForm) -> Tensor:
    """As `eager.policy_loss`."""
    if inputs.reference is None:
        form = replace(form, kl=0.0)
    if inputs.entropies is None:
        form = replace(form, entropy=0.0)
    reference = inputs.reference if inputs.reference is not None else inputs.generated
    entropies = inputs.entropies if inputs.entropies is not None else inputs.generated
    old = inputs.old
    if old is None:
        old = logprobs if form.truncation else inputs.generated
    call: Any = _SequenceGains.apply
    others = (each.detach().float().contiguous() for each in (inputs.advantages, inputs.generated, old, reference))
    gains: Tensor = call(
        logprobs.contiguous(), entropies.contiguous(), inputs.mask.contiguous(), *others, form, kernels
    )
    return -gains.sum() / form.divisor


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: Tensor, tokens: Tensor, temperature: float, kernels: FusedKernels
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


class _SequenceGains(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        logprobs: Tensor,
        entropies: Tensor,
        mask: Tensor,
        advantages: Tensor,
        generated: Tensor,
        old: Tensor,
        reference: Tensor,
        form: LossForm,
        kernels: FusedKernels,
    ) -> Tensor:
        gains, gradient = kernels.loss_forward(
            logprobs, mask, advantages, generated, old, reference, entropies.float(), form
        )
        context.save_for_backward(gradient, mask)
        context.form = form
        return gains

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_gains: Tensor) -> tuple[Tensor | None, ...]:
        gradient, mask = context.saved_tensors
        form: LossForm = context.form
        of_entropies: Tensor | None = None
        if context.needs_input_grad[1]:
            of_entropies = form.entropy * of_gains[:, None] * mask
            if form.by_length:
                of_entropies = of_entropies / mask.sum(1, keepdim=True).clamp(min=1)
        return gradient * of_gains[:, None], of_entropies, *[None] * 7
