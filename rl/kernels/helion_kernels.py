"""The kernels in Helion, with the configurations of `configs/`, so that no call begins to tune."""

from __future__ import annotations

from pathlib import Path

import helion
import helion.language as hl
import torch

from holdfast.rl.kernels.loss_form import MOST_LOG_RATIO, LossForm

Tensor = torch.Tensor

CONFIGS = Path(__file__).with_name("configs")


def configuration(kernel: str) -> helion.Config:
    """The block sizes and warps of a kernel."""
    return helion.Config.load(CONFIGS / f"{kernel}.json")


@helion.kernel(config=configuration("logprob_rows"), static_shapes=False)
def logprob_rows(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """As Triton's: one pass over a row; the token is taken by a mask."""
    rows, vocabulary = logits.size()
    chosen = torch.empty([rows], dtype=torch.float32, device=logits.device)
    normaliser = torch.empty([rows], dtype=torch.float32, device=logits.device)
    entropy = torch.empty([rows], dtype=torch.float32, device=logits.device)
    for tile in hl.tile(rows):
        most = hl.full([tile], float("-inf"), dtype=torch.float32)
        total = hl.zeros([tile], dtype=torch.float32)
        weighted = hl.zeros([tile], dtype=torch.float32)
        picked = hl.zeros([tile], dtype=torch.float32)
        token = tokens[tile]
        for columns in hl.tile(vocabulary):
            x = logits[tile, columns].to(torch.float32) / temperature
            found = torch.maximum(most, torch.amax(x, dim=1))
            safe = torch.where(found == float("-inf"), 0.0, found)
            shift = torch.where(most == float("-inf"), 0.0, most - safe)
            scale = torch.exp(most - safe)
            apart = x - safe[:, None]
            each = torch.exp(apart)
            here = (each * torch.where(each > 0, apart, 0.0)).sum(dim=1)
            weighted = scale * (weighted + total * shift) + here
            total = scale * total + each.sum(dim=1)
            most = found
            picked = picked + torch.where(columns.index[None, :] == token[:, None], x, 0.0).sum(dim=1)
        chosen[tile] = picked - most - torch.log(total)
        normaliser[tile] = most + torch.log(total)
        entropy[tile] = torch.log(total) - weighted / total
    return chosen, normaliser, entropy


@helion.kernel(config=configuration("logprob_gradient_rows"), static_shapes=False)
def logprob_gradient_rows(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor,
) -> Tensor:
    rows, vocabulary = logits.size()
    gradient = torch.empty_like(logits)
    for tile, columns in hl.tile([rows, vocabulary]):
        apart = logits[tile, columns].to(torch.float32) / temperature - normaliser[tile][:, None]
        share = torch.exp(apart)
        hit = torch.where(columns.index[None, :] == tokens[tile][:, None], 1.0, 0.0)
        information = share * torch.where(share > 0, apart + entropy[tile][:, None], 0.0)
        slope = of_logprobs[tile][:, None] * (hit - share) - of_entropies[tile][:, None] * information
        gradient[tile, columns] = (slope / temperature).to(logits.dtype)
    return gradient


@helion.kernel(config=configuration("gain_rows"), static_shapes=False)
def gain_rows(
    logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    generated: Tensor,
    old: Tensor,
    reference: Tensor,
    entropies: Tensor,
    least: float,
    most: float,
    kl: float,
    entropy: float,
    truncation: float,
    limit: float,
    sequence_ratio: hl.constexpr,
    by_length: hl.constexpr,
) -> tuple[Tensor, Tensor]:
    rows, length = logprobs.size()
    gains = torch.empty([rows], dtype=torch.float32, device=logprobs.device)
    gradient = torch.empty_like(logprobs)
    for tile in hl.tile(rows):
        advantage = advantages[tile][:, None]
        count = hl.zeros([tile], dtype=torch.float32)
        change = hl.zeros([tile], dtype=torch.float32)
        drift = hl.zeros([tile], dtype=torch.float32)
        for places in hl.tile(length):
            counts = mask[tile, places] != 0
            count = count + torch.where(counts, 1.0, 0.0).sum(dim=1)
            before = old[tile, places]
            change = change + torch.where(counts, logprobs[tile, places] - before, 0.0).sum(dim=1)
            drift = drift + torch.where(counts, before - generated[tile, places], 0.0).sum(dim=1)
        count = torch.clamp(count, min=1.0)
        gain = hl.zeros([tile], dtype=torch.float32)
        for places in hl.tile(length):
            counts = mask[tile, places] != 0
            new = torch.where(counts, logprobs[tile, places], 0.0)
            before = torch.where(counts, old[tile, places], 0.0)
            moved = before - torch.where(counts, generated[tile, places], 0.0)
            step = new - before
            if sequence_ratio:
                step = torch.zeros_like(step) + (change / count)[:, None]
                moved = torch.zeros_like(step) + (drift / count)[:, None]
            within = torch.clamp(step, -limit, limit)
            ratio = torch.exp(within)
            raw = ratio * advantage
            capped = torch.clamp(ratio, least, most) * advantage
            each = torch.minimum(raw, capped)
            slope = torch.where((raw <= capped) & (within == step), raw, 0.0)
            if truncation > 0:
                weight = torch.clamp(torch.exp(torch.clamp(moved, -limit, limit)), max=truncation)
                each = each * weight
                slope = slope * weight
            if kl > 0:
                apart = torch.where(counts, reference[tile, places], 0.0) - new
                near = torch.clamp(apart, -limit, limit)
                each = each - kl * (torch.exp(near) - near - 1.0)
                slope = slope + torch.where(near == apart, kl * (torch.exp(near) - 1.0), 0.0)
            if entropy > 0:
                each = each + entropy * torch.where(counts, entropies[tile, places], 0.0)
            if by_length:
                each = each / count[:, None]
                slope = slope / count[:, None]
            gain = gain + torch.where(counts, each, 0.0).sum(dim=1)
            gradient[tile, places] = torch.where(counts, slope, 0.0)
        gains[tile] = gain
    return gains, gradient


def logprobs_forward(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = logprob_rows(logits, tokens, temperature)
    return found


def logprobs_backward(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor,
) -> Tensor:
    gradient: Tensor = logprob_gradient_rows(
        logits, tokens, temperature, normaliser, entropy, of_logprobs, of_entropies
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
    found: tuple[Tensor, Tensor] = gain_rows(
        logprobs,
        mask.view(torch.uint8),
        advantages,
        generated,
        old,
        reference,
        entropies,
        1.0 - form.clip_low,
        1.0 + form.clip_high,
        form.kl,
        form.entropy,
        form.truncation,
        MOST_LOG_RATIO,
        form.sequence_ratio,
        form.by_length,
    )
    return found
