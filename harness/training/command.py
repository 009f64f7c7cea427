"""What the `holdfast rl` commands do: train, report, evaluate and export."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.comms.errors import HoldfastError
from holdfast.ft.console.console import FoldingTable, console, print_json
from holdfast.ft.console.output import visible
from holdfast.ft.console.units import coarse_seconds, counted, reward_text
from holdfast.ft.control import event_loop
from holdfast.harness.report.render import write
from holdfast.harness.training.driver import train_here
from holdfast.harness.training.live_view import LiveView
from holdfast.harness.training.report import episode_rows, processor_line, report_of, write_episodes
from holdfast.rl.config.named_code import load_code
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import load_config, placed
from holdfast.rl.generators.models import ModelSource, save_model
from holdfast.rl.run.evaluation import HeldOutAnswer, VersionEvaluation, evaluate_source
from holdfast.rl.run.policy import policy_source, tokenizer_of
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.saved_versions import SavedVersions
from holdfast.rl.trainers.training import weights_digest
from holdfast.store.interop.disk_copy import new_directory, new_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHOWN_GROUPS = 500
"""The most groups on the page of episodes: the newest ones."""


class NoRun(HoldfastError):
    """A folder holds no run."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"{directory} holds no run: it has no config.toml; `holdfast rl train` makes one")


def run_here(config: RunConfig, directory: Path, folder: Path, json: bool) -> None:
    """Train, or go on with what was begun in `directory`, and print the result."""
    out = console(quiet=json)
    view = LiveView(out, config.steps, quiet=json)
    try:
        with view:
            view.begin(f"{_started(config)}; the run is in {directory}")
            result = train_here(config, directory, folder, (view,))
    except (KeyboardInterrupt, SystemExit):
        if view.done:
            done = f"ended after {view.done:,} of {counted(config.steps, 'step')}"
            out.print(f"{done}; holdfast rl resume {directory} goes on", soft_wrap=True)
        raise
    if json:
        print_json(msgspec.to_builtins(result))
        return
    best = ""
    if result.best and result.best.reward is not None:
        best = f"; best held-out reward {reward_text(result.best.reward)}, version {result.best.version}"
    done = f"{counted(result.steps, 'step')} in {coarse_seconds(result.seconds)}{best}; weights {result.digest[:16]}"
    out.print(done, soft_wrap=True)
    out.print(f"read it: holdfast rl report {directory}; what it answers: holdfast rl eval {directory}", soft_wrap=True)


def _started(config: RunConfig) -> str:
    """The processes of a run, in words."""
    roles = [
        counted(config.trainer.replicas, "trainer"),
        counted(config.trainer.spares, "spare"),
        counted(config.generator.replicas, "generator"),
        counted(config.store.holders, "holder") + " of weights",
    ]
    if config.environment.name:
        roles.append(counted(config.environment.servers, "server") + f" of {config.environment.name}")
    return f"starting {', '.join(roles)}"


def configuration_of(directory: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration with which a run was begun. Raises `NoRun`, `BadConfig`."""
    run = RunDirectory(directory)
    if not run.config_file.exists():
        raise NoRun(directory)
    return load_config(run.config_file, overrides)


class WrittenPages(NamedTuple):
    """The pages of a run, and what its report says of holdfast's processor time, "" if that is not known."""

    report: Path
    episodes: Path
    processor: str


def write_pages(directory: Path, output: Path) -> WrittenPages:
    """Write the report and the episodes of a run into `output`, which this makes. Raises `NoRun`, `CorruptData`."""
    config = configuration_of(directory, ())
    run = RunDirectory(directory)
    tokenizer = tokenizer_of(config)
    task = Path(config.environment.name).name or Path(config.data.train).name or config.data.task
    title = f"{config.objective.algorithm.upper().replace('_', '. ')} on {task}"
    facts = (
        ("seed", str(config.seed)),
        ("steps", f"{config.steps:,}"),
        ("loop", f"{config.algorithm.mode}, staleness at most {config.algorithm.staleness}"),
        ("batch", f"{config.algorithm.groups} groups of {config.sampling.group}"),
        ("trainers", f"{config.trainer.replicas} ({config.trainer.strategy}), {config.trainer.spares} spare"),
        ("generators", f"{config.generator.replicas} ({config.generator.kind})"),
        ("holders of weights", f"{config.store.holders}, {config.store.copies} copies of each version"),
        ("weights on their way", "every bit" if config.store.cast == "none" else f"rounded to {config.store.cast}"),
        ("engine", config.engine.kind),
    )
    report = report_of(
        directory,
        title=title,
        configuration=facts,
        repeat=(f"holdfast rl train {run.config_file}",),
        steps=config.steps,
    )
    output.mkdir(parents=True, exist_ok=True)
    pages = WrittenPages(output / "report.html", output / "episodes.html", processor_line(report))
    write(report, pages.report)
    groups = {group.number: group for group in run.groups()}
    newest = [groups[number] for number in sorted(groups)[-SHOWN_GROUPS:]]
    rows = episode_rows(newest, tokenizer.decode)
    write_episodes(pages.episodes, f"Episodes of {title}", rows, len(groups) - len(newest))
    return pages


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
        result = event_loop.run(evaluate_source(config, source, prompts))
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


def export_folder(model: PreTrainedModel, tokenizer: str, out: Path) -> None:
    """Write a new folder with the model, and with the tokenizer of the folder `tokenizer` if that is not empty.

    It appears whole or not at all. Raises `CopyFailed`.
    """
    with new_directory(out.absolute()) as draft:
        save_model(model, draft)
        if tokenizer:
            from transformers import AutoTokenizer

            make: Any = AutoTokenizer
            make.from_pretrained(tokenizer, local_files_only=True).save_pretrained(draft)


def export_file(model: PreTrainedModel, metadata: Mapping[str, str], out: Path) -> None:
    """Write a new file of safetensors, with `metadata` in its header. Tied weights are in it once.

    It appears whole or not at all. Raises `CopyFailed`.
    """
    from safetensors.torch import save_model as save_file

    with new_file(out) as draft:
        save_file(model, str(draft), {"format": "pt", **metadata})
