"""What `holdfast rl eval` and `holdfast rl export` do with a saved version: show its score, and export it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.ft.console.console import FoldingTable, console, print_json
from holdfast.ft.console.output import visible
from holdfast.ft.console.units import coarse_seconds, counted, reward_text
from holdfast.harness.training.command import configuration_of
from holdfast.rl.config.named_code import load_code
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import load_config, placed
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.run.policy import policy_source
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.saved_versions import SavedVersions, export_file, export_folder
from holdfast.rl.run.version_evaluation import HeldOutAnswer, VersionEvaluation, evaluate_source
from holdfast.rl.trainers.training import weights_digest

EXAMPLES = 4
"""How many of the best answers are shown, and how many of the worst."""


class EvaluatedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What was evaluated (`version` is None for a folder of its own), and the result."""

    weights: str
    version: int | None
    digest: str
    result: VersionEvaluation


def run_of(target: Path) -> tuple[RunConfig, RunDirectory | None]:
    """The configuration in a file or in the folder of a run, which is given too. Raises `NoRun`, `BadConfig`."""
    if target.is_file():
        return placed(load_config(target), target.parent), None
    return configuration_of(target, ()), RunDirectory(target)


def evaluate_here(target: Path, version: str | None, model: Path | None, prompts: int, json: bool) -> None:
    """Evaluate a version of a run, or a model in a folder, in this process, and print the result."""
    config, directory = run_of(target)
    with tempfile.TemporaryDirectory(prefix="holdfast-eval-") as scratch:
        if model is not None:
            first = policy_source(config)
            number, name = None, str(model)
            source = ModelSource(path=name, dtype=first.dtype, vocabulary=first.vocabulary)
        else:
            saved = SavedVersions(config, directory)
            number = saved.find(version or ("latest" if saved.best is None else "best"))
            name = f"version {number} of {target}"
            source = saved.source(number, Path(scratch) / "model")
        result = asyncio.run(evaluate_source(config, source, prompts))
        digest = weights_digest(source.build().state_dict())
    found = EvaluatedVersion(weights=name, version=number, digest=digest, result=result)
    if json:
        print_json(found)
        return
    _show(console(), found, "held-out prompt" if config.has_prompts else "held-out episode")


def _show(out: Console, found: EvaluatedVersion, what: str) -> None:
    result = found.result
    out.print(
        f"{found.weights}: {counted(len(result.answers), what)}, {counted(result.tokens, 'token')} in "
        f"{coarse_seconds(result.seconds)}; weights {found.digest[:16]}"
    )
    scores = FoldingTable(box=None, pad_edge=False, show_header=False)
    scores.add_column()
    scores.add_column(justify="right")
    scores.add_row("reward", Text("none" if result.reward is None else reward_text(result.reward), "bold"))
    for name, value in result.parts.items():
        scores.add_row(f"  {name}", reward_text(value))
    if result.failed:
        scores.add_row("failed episodes", Text(str(result.failed), "red"))
    out.print(scores)
    ranked = sorted(result.answers, key=lambda each: each.reward, reverse=True)
    out.print(_examples(ranked[:EXAMPLES], ranked[EXAMPLES:][-EXAMPLES:]))


def _examples(best: Sequence[HeldOutAnswer], worst: Sequence[HeldOutAnswer]) -> FoldingTable:
    table = FoldingTable(box=None, pad_edge=False, header_style="dim")
    for name in ("prompt", "answer", "reference"):
        table.add_column(name)
    table.add_column("reward", justify="right")
    for rows, style in ((best, "green"), (worst, "red")):
        for each in rows:
            reward = each.failure or f"{each.reward:.2f}"
            table.add_row(each.prompt, Text(visible(each.answer), style), each.reference, reward)
    return table


def export_version(directory: Path, version: str, to: str, out: Path) -> str:
    """Export a saved version of a run; returns what was written, in words.

    `to` is "hf", "safetensors", or the name `FILE.py:NAME` of a function of the configuration, the model and the path,
    which returns what it wrote. Raises `NoSuchCode` for a name that leads to no code, and what the function raises.
    """
    config = configuration_of(directory, ())
    saved = SavedVersions(config, RunDirectory(directory))
    number = saved.find(version)
    said = f"version {number} of {directory} is in {out}"
    if to not in ("hf", "safetensors"):
        write = load_code(to)
        with tempfile.TemporaryDirectory(prefix="holdfast-export-") as scratch:
            return f"{said}: {write(config, saved.source(number, Path(scratch) / 'model'), out)}"
    model = saved.model(number)
    digest = weights_digest(model.state_dict())
    if to == "hf":
        export_folder(model, config.model.path, out)
    else:
        export_file(model, {"run": str(directory.absolute()), "version": str(number), "digest": digest}, out)
    return f"{said}; weights {digest[:16]}"
