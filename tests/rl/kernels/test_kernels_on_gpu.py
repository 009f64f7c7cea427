"""The fused kernels on a GPU, against torch's ops on the same GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from holdfast.rl.kernels import LossForm, LossInputs, dispatch, eager, policy_loss, token_logprobs
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
    assert len(errors) == 8
    assert not {name: error for name, error in errors.items() if error > BOUNDS.get(name, FLOAT32_BOUND)}


def test_gpu_the_dispatch_takes_a_fused_kernel_for_a_large_call_and_its_gradient_is_torchs() -> None:
    if find_spec("triton") is None and find_spec("helion") is None:
        pytest.skip("needs triton or helion: make peers")
    torch.manual_seed(2)
    logits = (3 * torch.randn(2, 64, 9001, device="cuda")).requires_grad_()
    assert logits.numel() > dispatch.LEAST
    tokens = torch.randint(0, 9001, (2, 64), device="cuda")
    mask = torch.ones(2, 64, dtype=torch.bool, device="cuda")
    form = LossForm(False, 0.2, 0.28, 0.0, 0.01, 1.5, True, divisor=2)
    found = []
    for make in (token_logprobs, lambda *args, **named: eager.token_logprobs(*args, 0.9, **named)):
        options = {"temperature": 0.9, "entropies": True} if make is token_logprobs else {"entropies": True}
        chosen, entropies = make(logits, tokens, **options)
        inputs = LossInputs(mask, torch.tensor([1.0, -0.5], device="cuda"), chosen.detach(), None, None, entropies)
        loss = policy_loss(chosen, inputs, form)
        (gradient,) = torch.autograd.grad(loss, logits)
        found.append((chosen.detach(), loss.detach(), gradient))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[0][2], found[1][2]), "two implementations were compared"
