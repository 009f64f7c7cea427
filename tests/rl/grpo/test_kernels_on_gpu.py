"""The fused kernels on a GPU, against torch's ops on the same GPU."""

from __future__ import annotations

import pytest
import torch

from holdfast.rl.grpo.token_logprobs import LEAST, eager_token_logprobs, token_logprobs
from support.rl.kernel_programs import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
]

BOUNDS = {"gradient of float16 logits": 2**-10, "gradient of bfloat16 logits": 2**-7}
FLOAT32_BOUND = 1e-5


@pytest.mark.parametrize("language", ["triton", "helion"])
def test_gpu_fused_kernels_compute_what_torchs_ops_do(language: str) -> None:
    pytest.importorskip(language, reason=f"needs {language}")
    errors = compare(language, "cuda")
    print(language, errors)
    assert len(errors) == 5
    assert not {name: error for name, error in errors.items() if error > BOUNDS.get(name, FLOAT32_BOUND)}


def test_gpu_the_dispatch_takes_a_fused_kernel_for_a_large_call_and_its_gradient_is_torchs() -> None:
    pytest.importorskip("triton", reason="needs triton: make peers")
    torch.manual_seed(2)
    logits = (3 * torch.randn(2, 64, 9001, device="cuda")).requires_grad_()
    assert logits.numel() > LEAST
    tokens = torch.randint(0, 9001, (2, 64), device="cuda")
    found = []
    for call in (token_logprobs, eager_token_logprobs):
        chosen, entropies = call(logits, tokens, 0.9, entropies=True)
        (gradient,) = torch.autograd.grad((chosen - entropies).sum(), logits)
        found.append((chosen.detach(), entropies.detach(), gradient))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[0][2], found[1][2]), "two implementations were compared"
