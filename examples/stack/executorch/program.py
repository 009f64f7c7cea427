"""Makes a program of ExecuTorch from a model and compares it with the model; runs in ExecuTorch's own environment.

python program.py JOB     # the arguments of `run` as JSON; what is found is written beside it
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

DIFFERENCE = 1e-6
"""The largest difference of a logit from eager torch that is always allowed."""

ROUNDING = 16.0
"""How many times eager torch's own rounding, by its difference from float64, a logit may differ where that is more.

Other kernels add in another order; 3 to 8 times was seen, also without XNNPACK.
"""

Logits = Callable[[torch.Tensor], torch.Tensor]
Tokens = Sequence[Sequence[int]]


class _LogitsOf(torch.nn.Module):
    """A causal model as a function of its tokens (1, length) alone."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits (1, length, vocabulary)."""
        return self.model(input_ids=tokens, use_cache=False).logits


def make_program(model: torch.nn.Module, length: int, vocabulary: int) -> tuple[bytes, float]:
    """The program for 1 to `length` tokens, and the share of its nodes that XNNPACK runs. It runs all that it can."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.devtools.backend_debug import get_delegation_info
    from executorch.exir import to_edge_transform_and_lower

    example = (torch.zeros(1, min(6, length), dtype=torch.int64, device="cpu"),)
    sizes = {"tokens": {1: torch.export.Dim("length", min=1, max=length)}}
    exported = torch.export.export(model, example, dynamic_shapes=sizes, strict=False)
    constants = {"get_max_seq_len": length, "get_vocab_size": vocabulary}
    edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()], constant_methods=constants)
    counts = get_delegation_info(edge.exported_program().graph_module)
    inside, outside = counts.num_delegated_nodes, counts.num_non_delegated_nodes
    return edge.to_executorch().buffer, inside / max(1, inside + outside)


def load(path: Path) -> Logits:
    """The program in a file as a function, through ExecuTorch's runtime."""
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(path).load_method("forward")
    return lambda tokens: method.execute([tokens])[0]


def greedy(logits: Logits, prompt: Sequence[int], most: int, stop: Sequence[int]) -> tuple[int, ...]:
    """The likeliest tokens after a prompt: at most `most`, and none after a stop token."""
    tokens = list(prompt)
    for _ in range(most):
        tokens.append(int(logits(torch.tensor([tokens], device="cpu"))[0, -1].argmax()))
        if tokens[-1] in stop:
            break
    return tuple(tokens[len(prompt) :])


@torch.no_grad()
def compare(program: Logits, model: _LogitsOf, prompts: Tokens, length: int) -> tuple[float, float]:
    """The largest difference of a logit, and the allowed one; for prompts and many lengths."""
    vocabulary = int(model.model.config.vocab_size)
    random = torch.Generator("cpu").manual_seed(0)
    lengths = sorted({1, length, *range(2, length, max(1, length // 16))})
    batches = [torch.randint(vocabulary, (1, each), generator=random, device="cpu") for each in lengths]
    batches += [torch.tensor([list(each)], device="cpu") for each in prompts[:32]]
    eager = [model(each) for each in batches]
    found = [program(each) for each in batches]
    model.double()
    exact = [model(each) for each in batches]
    model.float()
    difference, rounding = (
        max(float((one.double() - other.double()).abs().max()) for one, other in zip(eager, others, strict=True))
        for others in (found, exact)
    )
    return difference, max(DIFFERENCE, ROUNDING * rounding)


def run(
    model: str, draft: str, length: int, prompts: Tokens, answers: Tokens, max_new_tokens: int, stop: Sequence[int]
) -> dict[str, Any]:
    """Export the model in a folder to `draft`, for at most `length` tokens, and answer `prompts` with the program.

    The program is written whatever the comparison with the model, and with `answers`, says.
    """
    from transformers import AutoModelForCausalLM

    eager = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32)
    wrapped = _LogitsOf(eager.eval())
    program, delegated = make_program(wrapped, length, int(eager.config.vocab_size))
    Path(draft).write_bytes(program)
    logits = load(Path(draft))
    difference, allowed = compare(logits, wrapped, prompts, length)
    drawn = [list(greedy(logits, each, max_new_tokens, stop)) for each in prompts]
    return {
        "nbytes": len(program),
        "difference": difference,
        "allowed": allowed,
        "different": [number for number, answer in enumerate(drawn) if answer != list(answers[number])],
        "delegated": delegated,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    report = run(**msgspec.json.decode(Path(sys.argv[1]).read_bytes()))
    Path(sys.argv[1]).with_suffix(".report").write_bytes(msgspec.json.encode(report))
