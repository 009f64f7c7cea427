"""What the `holdfast rl` commands do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.ft.console.console import console, print_json
from holdfast.ft.console.units import coarse_seconds, counted, reward_text
from holdfast.harness.report.render import write
from holdfast.harness.training import episodes_page
from holdfast.harness.training.driver import train_here
from holdfast.harness.training.live_view import LiveView
from holdfast.harness.training.report import processor_line, report_of
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import load_config
from holdfast.rl.run.policy import tokenizer_of
from holdfast.rl.run.run_directory import RunDirectory

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
    """Write the report and the episodes of a run. Raises `NoRun`, `CorruptData`."""
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
    pages = WrittenPages(output / "report.html", output / "episodes.html", processor_line(report))
    write(report, pages.report)
    groups = {group.number: group for group in run.groups()}
    newest = [groups[number] for number in sorted(groups)[-SHOWN_GROUPS:]]
    rows = episodes_page.rows_of(newest, tokenizer.decode)
    episodes_page.write(pages.episodes, f"Episodes of {title}", rows, len(groups) - len(newest))
    return pages
