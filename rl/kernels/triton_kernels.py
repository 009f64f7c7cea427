"""The kernels in Triton: one program a row, which walks it in blocks of a fixed size.

So padding at the end of a row, and the rows beside it, change no bit of a row's result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.rl.kernels.loss_form import MOST_LOG_RATIO, LossForm

Tensor = torch.Tensor

VOCABULARY_BLOCK = 2048
SEQUENCE_BLOCK = 256
"""Hand-chosen, and not tuned; `docs/performance.md` has their times on an H200."""


@triton.jit
def logprob_rows(logits, tokens, temperature, chosen, normaliser, entropy, vocabulary, block: tl.constexpr):
    """Log-probability, logarithm of the normaliser, and entropy of a row, in one pass (online softmax)."""
    row = tl.program_id(0).to(tl.int64)
    data = logits + row * vocabulary
    most = -float("inf")
    total = 0.0
    weighted = 0.0
    for at in range(0, vocabulary, block):
        columns = at + tl.arange(0, block)
        x = tl.load(data + columns, mask=columns < vocabulary, other=-float("inf")).to(tl.float32) / temperature
        found = tl.maximum(most, tl.max(x, 0))
        safe = tl.where(found == -float("inf"), 0.0, found)
        shift = tl.where(most == -float("inf"), 0.0, most - safe)
        scale = tl.exp(most - safe)
        each = tl.exp(x - safe)
        weighted = scale * (weighted + total * shift) + tl.sum(each * tl.where(each > 0, x - safe, 0.0), 0)
        total = scale * total + tl.sum(each, 0)
        most = found
    picked = tl.load(data + tl.load(tokens + row)).to(tl.float32) / temperature
    tl.store(chosen + row, picked - most - tl.log(total))
    tl.store(normaliser + row, most + tl.log(total))
    tl.store(entropy + row, tl.log(total) - weighted / total)


@triton.jit
def logprob_gradient_rows(
    logits,
    tokens,
    temperature,
    normaliser,
    entropy,
    of_logprobs,
    of_entropies,
    gradient,
    vocabulary,
    block: tl.constexpr,
):
    """The gradient of a row of logits, from the row's normaliser."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    log_total, mean_information = tl.load(normaliser + row), tl.load(entropy + row)
    from_logprob, from_entropy = tl.load(of_logprobs + row), tl.load(of_entropies + row)
    for at in range(0, vocabulary, block):
        columns = at + tl.arange(0, block)
        inside = columns < vocabulary
        x = tl.load(logits + row * vocabulary + columns, mask=inside, other=-float("inf")).to(tl.float32) / temperature
        share = tl.exp(x - log_total)
        hit = tl.where(columns == token, 1.0, 0.0)
        slope = from_logprob * (hit - share)
        slope -= from_entropy * share * tl.where(share > 0, x - log_total + mean_information, 0.0)
        tl.store(gradient + row * vocabulary + columns, slope / temperature, mask=inside)


@triton.jit
def gain_rows(
    logprobs,
    mask,
    advantages,
    generated,
    old,
    reference,
    entropies,
    gains,
    gradient,
    length,
    least,
    most,
    kl,
    entropy,
    truncation,
    limit,
    sequence_ratio: tl.constexpr,
    truncated: tl.constexpr,
    with_kl: tl.constexpr,
    with_entropy: tl.constexpr,
    by_length: tl.constexpr,
    block: tl.constexpr,
):
    """The gain of a sequence and its gradient. One pass sums over the whole sequence, the next takes its tokens."""
    row = tl.program_id(0).to(tl.int64)
    start = row * length
    advantage = tl.load(advantages + row)
    count = 0.0
    change = 0.0
    drift = 0.0
    for at in range(0, length, block):
        places = at + tl.arange(0, block)
        counts = tl.load(mask + start + places, mask=places < length, other=0) != 0
        count += tl.sum(counts.to(tl.float32), 0)
        if sequence_ratio:
            before = tl.load(old + start + places, mask=counts, other=0.0)
            change += tl.sum(tl.load(logprobs + start + places, mask=counts, other=0.0) - before, 0)
            drift += tl.sum(before - tl.load(generated + start + places, mask=counts, other=0.0), 0)
    count = tl.maximum(count, 1.0)
    gain = 0.0
    for at in range(0, length, block):
        places = at + tl.arange(0, block)
        counts = tl.load(mask + start + places, mask=places < length, other=0) != 0
        new = tl.load(logprobs + start + places, mask=counts, other=0.0)
        before = tl.load(old + start + places, mask=counts, other=0.0)
        step = change / count + tl.zeros_like(new) if sequence_ratio else new - before
        within = tl.minimum(tl.maximum(step, -limit), limit)
        ratio = tl.exp(within)
        raw = ratio * advantage
        capped = tl.minimum(tl.maximum(ratio, least), most) * advantage
        each = tl.minimum(raw, capped)
        slope = tl.where((raw <= capped) & (within == step), raw, 0.0)
        if truncated:
            if sequence_ratio:
                moved = drift / count + tl.zeros_like(new)
            else:
                moved = before - tl.load(generated + start + places, mask=counts, other=0.0)
            weight = tl.minimum(tl.exp(tl.minimum(tl.maximum(moved, -limit), limit)), truncation)
            each *= weight
            slope *= weight
        if with_kl:
            apart = tl.load(reference + start + places, mask=counts, other=0.0) - new
            near = tl.minimum(tl.maximum(apart, -limit), limit)
            each -= kl * (tl.exp(near) - near - 1.0)
            slope += tl.where(near == apart, kl * (tl.exp(near) - 1.0), 0.0)
        if with_entropy:
            each += entropy * tl.load(entropies + start + places, mask=counts, other=0.0)
        if by_length:
            each /= count
            slope /= count
        gain += tl.sum(tl.where(counts, each, 0.0), 0)
        tl.store(gradient + start + places, tl.where(counts, slope, 0.0), mask=places < length)
    tl.store(gains + row, gain)


def logprobs_forward(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    chosen, normaliser, entropy = logits.new_empty(3, len(logits), dtype=torch.float32).unbind()
    if len(logits):
        logprob_rows[(len(logits),)](
            logits,
            tokens,
            temperature,
            chosen,
            normaliser,
            entropy,
            logits.shape[1],
            block=VOCABULARY_BLOCK,
        )
    return chosen, normaliser, entropy


def logprobs_backward(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor,
) -> Tensor:
    gradient = torch.empty_like(logits)
    if len(logits):
        logprob_gradient_rows[(len(logits),)](
            logits,
            tokens,
            temperature,
            normaliser,
            entropy,
            of_logprobs,
            of_entropies,
            gradient,
            logits.shape[1],
            block=VOCABULARY_BLOCK,
        )
    return gradient


def loss_forward(
    logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    generated: Tensor,
    old: Tensor,
    reference: Tensor,
    entropies: Tensor,
    form: LossForm,
) -> tuple[Tensor, Tensor]:
    gains, gradient = advantages.new_empty(len(logprobs)), torch.empty_like(logprobs)
    if len(logprobs):
        gain_rows[(len(logprobs),)](
            logprobs,
            mask.view(torch.uint8),
            advantages,
            generated,
            old,
            reference,
            entropies,
            gains,
            gradient,
            logprobs.shape[1],
            1.0 - form.clip_low,
            1.0 + form.clip_high,
            form.kl,
            form.entropy,
            form.truncation,
            MOST_LOG_RATIO,
            sequence_ratio=form.sequence_ratio,
            truncated=form.truncation > 0,
            with_kl=form.kl > 0,
            with_entropy=form.entropy > 0,
            by_length=form.by_length,
            block=SEQUENCE_BLOCK,
        )
    return gains, gradient
