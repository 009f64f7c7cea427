"""All kernels compute what torch's ops do, within the stated errors; the dispatch takes them where they fit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.rl.grpo import token_logprobs as dispatch
from holdfast.rl.grpo.token_logprobs import LEAST, eager_token_logprobs, token_logprobs
from support.rl.kernel_programs import compare
from support.source_tree import TESTS
from support.weights.peers import site_of

BOUNDS = {"gradient of float16 logits": 2**-10, "gradient of bfloat16 logits": 2**-7}
"""A unit in the last place of the dtype of the logits; everything else is float32."""
FLOAT32_BOUND = 1e-5


def run_program(*arguments: str, packages: tuple[str, ...], **environment: str) -> Any:
    """What a program of `kernel_programs` prints, in a process that can import some packages."""
    sites = [site_of(package) for package in packages]
    if None in sites:
        pytest.skip(f"needs {' and '.join(packages)}: make peers")
    path = os.pathsep.join([str(TESTS), *filter(None, [*sites, os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "support.rl.kernel_programs", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment | {"PYTHONPATH": path},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("language", ["triton", "helion"])
def test_fused_kernels_compute_what_torchs_ops_do(language: str) -> None:
    """In the interpreter of the language, on CPU memory. The two refuse each other, so each has a process."""
    packages = ("triton",) if language == "triton" else ("triton", "helion")
    errors = run_program("compare", language, packages=packages, **{f"{language.upper()}_INTERPRET": "1"})
    assert len(errors) == 5
    assert not {name: error for name, error in errors.items() if error > BOUNDS.get(name, FLOAT32_BOUND)}


@pytest.mark.thorough
@pytest.mark.timeout(320)
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """Triton's for an H100 down to machine code; Helion's to Triton, with its configuration."""
    assert len(run_program("compile", packages=("triton", "helion"), TRITON_CACHE_DIR=str(tmp_path))) == 4


def test_the_cpu_and_double_precision_get_torchs_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits that these formulas had before there was a choice."""
    monkeypatch.setattr(dispatch, "LEAST", 0)
    logits, tokens = torch.randn(4, 3, 11), torch.randint(0, 11, (4, 3))
    predicted = (logits.float() / 0.7).log_softmax(-1)
    chosen, entropies = token_logprobs(logits, tokens, 0.7, entropies=True)
    assert torch.equal(chosen, predicted.gather(2, tokens.unsqueeze(2)).squeeze(2))
    assert entropies is not None
    assert torch.equal(entropies, -(predicted.exp() * predicted).sum(-1))
    assert token_logprobs(logits, tokens)[1] is None


def test_large_calls_on_cuda_are_handed_to_the_fused_kernels_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 3)
    assert dispatch.fused_kernels(cpu, 1 << 30) is None
    assert dispatch.fused_kernels(gpu, dispatch.LEAST - 1) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dispatch.fused_kernels(gpu, 1 << 30) is None

    kernels = SimpleNamespace(logprobs_forward=lambda logits, *_: (logits[:, 0],) * 3)
    monkeypatch.setattr(dispatch, "fused_kernels", lambda _, elements: kernels if elements >= 8 else None)
    for rows, dtype, fused in ((4, torch.float32, True), (3, torch.float32, False), (4, torch.float64, False)):
        logits, tokens = torch.rand(rows, 2, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
        wanted = logits[:, 0] if fused else eager_token_logprobs(logits, tokens, 1.0, entropies=False)[0]
        assert torch.equal(token_logprobs(logits, tokens)[0], wanted)


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a GPU."""
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    return pytest.mark.gpu(needs(pytest.mark.timeout(300)(test)))


@on_gpu
@pytest.mark.parametrize("language", ["triton", "helion"])
def test_gpu_fused_kernels_compute_what_torchs_ops_do(language: str) -> None:
    pytest.importorskip(language, reason=f"needs {language}")
    errors = compare(language, "cuda")
    print(language, errors)
    assert len(errors) == 5
    assert not {name: error for name, error in errors.items() if error > BOUNDS.get(name, FLOAT32_BOUND)}


@on_gpu
def test_gpu_the_dispatch_takes_a_fused_kernel_for_a_large_call_and_its_gradient_is_torchs() -> None:
    pytest.importorskip("triton", reason="needs triton: make peers")
    logits = (3 * torch.randn(2, 64, 9001, device="cuda")).requires_grad_()
    assert logits.numel() > LEAST
    tokens = torch.randint(0, 9001, (2, 64), device="cuda")
    found = []
    for call in (token_logprobs, eager_token_logprobs):
        chosen, entropies = call(logits, tokens, 0.9, entropies=True)
        (gradient,) = torch.autograd.grad((chosen - entropies).sum(), logits)
        found.append((chosen.detach(), entropies.detach(), gradient))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[0][2], found[1][2]), "two implementations were compared"
