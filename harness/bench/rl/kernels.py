"""`python -m holdfast.harness.bench.rl.kernels`: the policy-gradient kernels on a GPU, forward and backward.

Times torch's ops (eager), the same under torch.compile, and Triton's and Helion's kernels, whichever are installed, in
turn: milliseconds (the median), and the most memory that a call takes beside its inputs. `--small` finds the size from
which a fused kernel is faster than torch's ops.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from holdfast.rl.kernels import LossForm, LossInputs, eager, fused

Tensor = torch.Tensor
Call = Callable[[], object]
_cuda: Any = torch.cuda  # its events have no types

LOGITS = ((4096, 32_000, torch.bfloat16), (2048, 151_936, torch.bfloat16), (2048, 151_936, torch.float32))
SEQUENCES = ((256, 1024), (512, 8192))
SMALL_LOGITS = tuple((1 << rows, 4096, torch.float32) for rows in range(0, 11, 2))
SMALL_SEQUENCES = tuple((16, 1 << length) for length in range(6, 17, 2))
FORM = LossForm(False, 0.2, 0.28, 0.04, 0.01, 1.5, True, divisor=64)
ROUNDS, WARM_UPS = 15, 4


def implementations() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """`token_logprobs` and `policy_loss` of each implementation that is installed."""
    import torch._dynamo as dynamo

    dynamo.config.recompile_limit = 64
    found: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "eager": (eager.token_logprobs, eager.policy_loss),
        "compile": (
            torch.compile(eager.token_logprobs, dynamic=False),
            torch.compile(eager.policy_loss, dynamic=False),
        ),
    }
    if find_spec("triton") is not None:
        from holdfast.rl.kernels import triton_kernels

        found["triton"] = _fused(triton_kernels)
    if find_spec("helion") is not None:
        from holdfast.rl.kernels import helion_kernels

        found["helion"] = _fused(helion_kernels)
    return found


def _fused(kernels: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return partial(fused.token_logprobs, kernels), partial(fused.policy_loss, kernels)


def logprob_call(function: Callable[..., Any], rows: int, vocabulary: int, dtype: torch.dtype) -> Call:
    """A forward and backward of `token_logprobs` with entropies."""
    logits = (3 * torch.randn(rows, vocabulary, device="cuda")).to(dtype).requires_grad_()
    tokens = torch.randint(0, vocabulary, (rows,), device="cuda")

    def call() -> object:
        chosen, entropies = function(logits, tokens, 1.0, entropies=True)
        return torch.autograd.grad(chosen.sum() - 0.01 * entropies.sum(), logits)

    return call


def loss_call(function: Callable[..., Any], rows: int, length: int) -> Call:
    """A forward and backward of `policy_loss` with all its terms."""
    logprobs = -torch.rand(rows, length, device="cuda")
    generated, old, reference = (logprobs + 0.1 * torch.randn_like(logprobs) for _ in range(3))
    mask = torch.rand(rows, length, device="cuda") > 0.2
    entropies = torch.rand(rows, length, device="cuda").requires_grad_()
    inputs = LossInputs(mask, torch.randn(rows, device="cuda"), generated, old, reference, entropies)
    logprobs.requires_grad_()

    def call() -> object:
        return torch.autograd.grad(function(logprobs, inputs, FORM), (logprobs, entropies))

    return call


def timed(calls: dict[str, Call]) -> dict[str, tuple[float, float]]:
    """Milliseconds (median) and MiB beside the inputs of each call; the calls take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    memory: dict[str, float] = {}
    for name, call in calls.items():
        for _ in range(WARM_UPS):
            call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end))
    return {name: (statistics.median(seconds[name]), memory[name]) for name in calls}


def line(what: str, figures: dict[str, tuple[float, float]]) -> str:
    """The figures of one size."""
    return f"{what:34}" + "".join(f"  {name} {ms:8.3f} ms {mib:7.0f} MiB" for name, (ms, mib) in figures.items())


def run(logits: Sequence[tuple[int, int, torch.dtype]], sequences: Sequence[tuple[int, int]]) -> None:
    """Print the figures of all sizes."""
    functions = implementations()
    for rows, vocabulary, dtype in logits:
        calls = {name: logprob_call(each, rows, vocabulary, dtype) for name, (each, _) in functions.items()}
        kind = str(dtype).removeprefix("torch.")
        print(line(f"token_logprobs {rows} x {vocabulary} {kind}", timed(calls)), flush=True)
        del calls
        torch.cuda.empty_cache()
    for rows, length in sequences:
        calls = {name: loss_call(each, rows, length) for name, (_, each) in functions.items()}
        print(line(f"policy_loss {rows} x {length}", timed(calls)), flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; these kernels serve CUDA tensors alone")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, forward and backward")
    torch.manual_seed(0)
    run(*((SMALL_LOGITS, SMALL_SEQUENCES) if "--small" in sys.argv else (LOGITS, SEQUENCES)))
