"""The kernels in Triton: one program a row, which walks it in blocks of a fixed size.

So padding at the end of a row, and the rows beside it, change no bit of a row's result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

VOCABULARY_BLOCK = 2048
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


def logprobs_forward(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens' log-probabilities, the logarithms of the normalisers, and the entropies, each (rows,) of float32.

    `logits` are (rows, vocabulary), `tokens` (rows,) of int64, all contiguous.
    """
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
    """The gradient of the logits, in their dtype, from the gradients of log-probabilities and entropies."""
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
