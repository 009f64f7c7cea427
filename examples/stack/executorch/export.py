"""Exports a run's model as a program of ExecuTorch, and refuses one that does not answer as the model does.

    holdfast rl export run --to examples/stack/executorch/export.py:export model.pte    # needs: make extra-executorch

ExecuTorch brings torchao, which changes what transformers does: `program.py` runs in an environment of its own.
"""

import asyncio
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.ft.console.units import counted
from holdfast.rl.config.named_code import extra_python
from holdfast.rl.config.run_config import GeneratorConfig, RunConfig, Sampling
from holdfast.rl.data.episode import Prompt
from holdfast.rl.generators.models import ModelSource, save_model
from holdfast.rl.generators.transformers_generator import TransformersGenerator
from holdfast.rl.run.evaluation import held_out_prompts
from holdfast.rl.run.policy import task_of
from holdfast.store.interop.disk_copy import new_file

COMPARED_PROMPTS = 200
"""How many held-out prompts a program is compared with the model on, at most."""


def export(config: RunConfig, source: ModelSource, out: Path) -> str:
    """Export a version of a run; returns what was written, in words."""
    prompts = held_out_prompts(config, task_of(config), COMPARED_PROMPTS)
    report = export_program(source, prompts, config.sampling, out)
    return (
        f"{report.nbytes:,} bytes, {report.delegated:.0%} of its nodes in XNNPACK; logits within "
        f"{report.difference:.1e} of eager torch's (allowed {report.allowed:.1e}), "
        f"{counted(len(prompts), 'held-out prompt')} answered as the model does"
    )


LONGEST = 2048
"""The longest sequence of a program: the runtime reserves memory for it. A model's own limit may be lower."""

SECONDS = 3600.0
"""The limit of the other interpreter's time."""

_LINES = 12
"""How much of its output an error quotes."""


class ExportRefused(HoldfastError):
    """A version was not exported: the program differs from the model, or could not be made. Nothing is left of it."""

    def __init__(self, out: Path, why: str) -> None:
        self.out, self.why = out, why
        super().__init__(f"{out} was not written: {why}")


class ExecutorchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: the largest difference of a logit from eager torch, and the one that is allowed.

    `delegated` is the share of the program's nodes that run in XNNPACK, `different` the prompts that it answers
    otherwise than the model.
    """

    nbytes: int
    difference: float
    allowed: float
    different: tuple[int, ...]
    delegated: float


def export_program(source: ModelSource, prompts: Sequence[Prompt], sampling: Sampling, out: Path) -> ExecutorchReport:
    """Write a new program of ExecuTorch in float32 with XNNPACK, for any length; its method `forward` gives logits.

    The program answers `prompts` as the model does, greedily, and its logits are as near to those of eager torch as the
    report says. Raises `ExtraNotInstalled`, `ExportRefused`, `CopyFailed`.
    """
    python = extra_python("executorch")
    source = msgspec.structs.replace(source, dtype="float32")
    with tempfile.TemporaryDirectory(prefix="holdfast-export-") as scratch, new_file(out) as draft:
        model = source.build()
        length = min(source.longest_sequence(), LONGEST)
        save_model(model, Path(scratch) / "model")
        job = {
            "model": str(Path(scratch) / "model"),
            "draft": str(draft.absolute()),
            "length": length,
            "prompts": [each.tokens for each in prompts],
            "answers": asyncio.run(_answers(source, prompts, sampling)),
            "max_new_tokens": sampling.max_new_tokens,
            "stop": sampling.stop,
        }
        report = _run(python, job, Path(scratch), out)
        if report.difference > report.allowed:
            raise ExportRefused(
                out, f"its logits differ from the model's by {report.difference:.2g}, more than {report.allowed:.2g}"
            )
        if report.different:
            first = prompts[report.different[0]]
            raise ExportRefused(
                out,
                f"it answers {counted(len(report.different), 'prompt')} of {len(prompts)} otherwise than the model "
                f"does, the first of them {first.text!r}",
            )
    return report


def _run(python: Path, job: Mapping[str, object], scratch: Path, out: Path) -> ExecutorchReport:
    file = scratch / "job.json"
    file.write_bytes(msgspec.json.encode(job))
    command = [str(python), "-P", str(Path(__file__).with_name("program.py")), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-_LINES:])
        raise ExportRefused(out, f"ExecuTorch cannot export the model (exit status {done.returncode}):\n{said}")
    return msgspec.json.decode(file.with_suffix(".report").read_bytes(), type=ExecutorchReport)


async def _answers(source: ModelSource, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[tuple[int, ...], ...]:
    config = RunConfig(sampling=sampling, generator=GeneratorConfig(timeout=SECONDS))
    generator = TransformersGenerator(source, None, config)
    try:
        found = await generator.generate(sampling.greedy((each.tokens for each in prompts), None))
    finally:
        generator.close()
    return tuple(each.tokens for each in found)
