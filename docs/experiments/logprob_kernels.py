"""How fast are the log-probabilities of tokens on a GPU? `python docs/experiments/logprob_kernels.py`.

Times forward and backward by torch's ops (eager), the same under torch.compile, and Triton's kernel if it is installed,
in turn: milliseconds (the median), and the most memory that a call takes beside its inputs. `--small` finds the size
from which the fused kernel is faster than torch's ops.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from holdfast.rl.grpo.token_logprobs import eager_token_logprobs, fused_token_logprobs

Tensor = torch.Tensor
Call = Callable[[], object]
_cuda: Any = torch.cuda  # its events have no types

LOGITS = ((4096, 32_000, torch.bfloat16), (2048, 151_936, torch.bfloat16), (2048, 151_936, torch.float32))
SMALL_LOGITS = tuple((1 << rows, 4096, torch.float32) for rows in range(0, 11, 2))
ROUNDS, WARM_UPS = 15, 4


def implementations() -> dict[str, Callable[..., Any]]:
    """`token_logprobs` of each implementation that is installed."""
    import torch._dynamo as dynamo

    dynamo.config.recompile_limit = 64
    found: dict[str, Callable[..., Any]] = {
        "eager": eager_token_logprobs,
        "compile": torch.compile(eager_token_logprobs, dynamic=False),
    }
    if find_spec("triton") is not None:
        from holdfast.rl.grpo import triton_logprobs

        found["triton"] = partial(fused_token_logprobs, triton_logprobs)
    return found


def logprob_call(function: Callable[..., Any], rows: int, vocabulary: int, dtype: torch.dtype) -> Call:
    """A forward and backward of `token_logprobs` with entropies."""
    logits = (3 * torch.randn(rows, vocabulary, device="cuda")).to(dtype).requires_grad_()
    tokens = torch.randint(0, vocabulary, (rows,), device="cuda")

    def call() -> object:
        chosen, entropies = function(logits, tokens, 1.0, entropies=True)
        return torch.autograd.grad(chosen.sum() - 0.01 * entropies.sum(), logits)

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


def run(logits: Sequence[tuple[int, int, torch.dtype]]) -> None:
    """Print the figures of all sizes."""
    functions = implementations()
    for rows, vocabulary, dtype in logits:
        calls = {name: logprob_call(each, rows, vocabulary, dtype) for name, each in functions.items()}
        kind = str(dtype).removeprefix("torch.")
        print(line(f"token_logprobs {rows} x {vocabulary} {kind}", timed(calls)), flush=True)
        del calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; the kernel serves CUDA tensors alone")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, forward and backward")
    torch.manual_seed(0)
    run(SMALL_LOGITS if asked.small else LOGITS)
