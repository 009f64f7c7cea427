"""Log-probabilities of tokens as Helion kernels, beside torch's ops and with their gradients.

    python examples/stack/helion/token_logprobs.py                      # on a GPU
    HELION_INTERPRET=1 python examples/stack/helion/token_logprobs.py   # anywhere, in Helion's interpreter

Prints the largest errors. The functions have the interface of `holdfast.rl.grpo.triton_logprobs`, so holdfast's
autograd runs over them: `fused_token_logprobs(kernels, ...)`, where `kernels` is this module. Needs
pip install helion.
"""

from __future__ import annotations

import sys

import helion
import helion.language as hl
import torch

from holdfast.rl.grpo.token_logprobs import eager_token_logprobs, fused_token_logprobs

Tensor = torch.Tensor

CONFIG = helion.Config(block_sizes=[1, 2048], num_warps=4, num_stages=2)
"""Chosen by hand, so that no call begins to tune. `kernel.autotune(arguments)` finds a better one on a GPU."""


@helion.kernel(config=CONFIG, static_shapes=False)
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


@helion.kernel(config=CONFIG, static_shapes=False)
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


logprobs_forward, logprobs_backward = logprob_rows, logprob_gradient_rows


def main() -> None:
    """Compare a forward and backward with torch's ops, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    logits, tokens = 4 * torch.randn(3, 4100, device=device), torch.randint(0, 4100, (3,), device=device)
    ours, theirs = logits.requires_grad_(), logits.detach().clone().requires_grad_()
    chosen, _ = fused_token_logprobs(sys.modules[__name__], ours, tokens, 0.7, entropies=True)
    expected, _ = eager_token_logprobs(theirs, tokens, 0.7, entropies=True)
    (gradient,), (wanted,) = torch.autograd.grad(chosen.sum(), ours), torch.autograd.grad(expected.sum(), theirs)
    for name, mine, other in (("log-probabilities", chosen, expected), ("gradient", gradient, wanted)):
        print(name, float((mine.detach() - other.detach()).abs().max()))


if __name__ == "__main__":
    main()
