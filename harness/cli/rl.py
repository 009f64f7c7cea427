"""The `holdfast rl` commands: train, resume, evaluate, and read a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.harness.command_line import CANNOT_BEGIN, CommandGroup, check_folder, check_modules

app = CommandGroup(
    help="Train a language model by reinforcement, resume a run, and read what it did.", no_args_is_help=True
)


Config = Annotated[Path, typer.Argument(help="A TOML file; docs/reference/rl-config.md has all fields.")]
Directory = Annotated[Path, typer.Option("--directory", "-d", help="The folder of the run: new, or to go on with.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a field; may be repeated.")]
RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]


@app.command()
def train(
    config: Config,
    directory: Directory = Path("run"),
    set_: Sets = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole configuration, and start nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Train by the configuration in a file, in processes of this machine.

    [bold]Examples[/bold]

        holdfast rl train examples/rl/arithmetic.toml

        holdfast rl train examples/rl/arithmetic.toml --set steps=200 --set objective.algorithm=dapo

        holdfast rl train examples/rl/arithmetic.toml --dry-run

    Any process may die on the way, this command included: the same command goes on from the last checkpoint.

    Exit status: 0 once all steps are trained; 2 if the run was refused, or cannot go on; 130 after Ctrl-C and 143 after
    SIGTERM, which end all of its processes.
    """
    from holdfast.ft.processes.zygote_start import start_early
    from holdfast.harness.training import PRELOAD

    if not dry_run:
        start_early(*PRELOAD)
    from holdfast.rl.config.toml import load_config, resolved

    read = load_config(config, set_ or ())
    if dry_run:
        typer.echo(resolved(read), nl=False)
        return
    from holdfast.harness.training.command import run_here

    run_here(read, directory, config.parent, json)


@app.command()
def resume(directory: RunFolder = Path("run"), set_: Sets = None, json: Json = False) -> None:
    """Go on with a run from its last checkpoint, after its driver has ended.

    [bold]Examples[/bold]

        holdfast rl resume run

        holdfast rl resume run --set trainer.replicas=4

    Nothing is trained twice in the weights, and no prompt is skipped. What the weights depend on cannot be changed.
    """
    from holdfast.ft.processes.zygote_start import start_early
    from holdfast.harness.training import PRELOAD

    start_early(*PRELOAD)
    from holdfast.harness.training.command import configuration_of, run_here

    run_here(configuration_of(directory, set_ or ()), directory, directory, json)


@app.command(name="eval")
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN|CONFIG", help="The folder of a run, or a TOML file.")],
    version: Annotated[
        str | None, typer.Option(metavar="N|best|latest", show_default="best", help="A version that is on disk.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder that transformers loads, instead of a version.")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=0, show_default="as many as the run", help="How many held-out prompts, or episodes.")
    ] = 0,
    json: Json = False,
) -> None:
    """Evaluate a version of a run on the held-out prompts of its configuration, or on episodes in its environment.

    [bold]Examples[/bold]

        holdfast rl eval run

        holdfast rl eval run --version latest --prompts 50

        holdfast rl eval examples/rl/arithmetic.toml --model exported

    On disk are version 0, those of the newest checkpoints, and the best one. No process of the run is needed, and
    episodes are played in this one, or at environment.addresses. The names in TorchTitan's checkpoints
    are translated by its interpreter: trainer.python, or that of make extra-titan.
    """
    from holdfast.harness.training.command import evaluate_here

    if version is not None and model is not None:
        raise typer.BadParameter("give a version or a model", param_hint="--version, --model")
    evaluate_here(target, version, model, prompts, json)


@app.command()
def export(
    directory: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder, or the new file.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="hf|safetensors|FILE.py:NAME",
            help="A folder that transformers loads, one file of weights, or a function of yours.",
        ),
    ] = "hf",
    version: Annotated[str, typer.Option(metavar="N|best|latest", help="A version that is on disk.")] = "best",
) -> None:
    """Write a version of a run as a folder of transformers, as a file of safetensors, or by a function.

    [bold]Examples[/bold]

        holdfast rl export run exported

        holdfast rl export run --version latest --to safetensors model.safetensors

        holdfast rl export run --to examples/stack/executorch/export.py:export model.pte

    A function takes the run's configuration, the model and OUT, and returns what it wrote in words.
    """
    from holdfast.harness.training.command import export_version

    typer.echo(export_version(directory, version, to, out))


@app.command()
def report(
    directory: RunFolder = Path("run"),
    output: Annotated[Path, typer.Option(help="The folder for report.html and episodes.html.")] = Path("report"),
) -> None:
    """Write the report of a run, and its episodes as a page that can be read.

    [bold]Examples[/bold]

        holdfast rl report run

        holdfast rl report run --output public
    """
    from holdfast.harness.training.command import write_pages

    check_modules("report", "the report", "jinja2", "matplotlib")
    check_folder(output, "--output", "report.html", "episodes.html")
    pages = write_pages(directory, output)
    for page in (pages.report, pages.episodes):
        typer.echo(f"report: {page}")
    if pages.processor:
        typer.echo(pages.processor)


environment_app = CommandGroup(help="Environments that runs play in.", no_args_is_help=True)


@environment_app.command()
def serve(
    name: Annotated[str, typer.Argument(help="Such as guess?high=9 or python:FILE.py:NAME.")],
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 0,
    sessions: Annotated[int, typer.Option(min=1, help="Episodes that are played at the same time.")] = 64,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds after which a step has failed.")] = 30.0,
    lease: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which an idle client loses its place.")
    ] = 300.0,
) -> None:
    """Serve an environment by OpenEnv's protocol, until Ctrl-C or SIGTERM.

    [bold]Examples[/bold]

        holdfast rl environment serve guess --port 8123

        holdfast rl environment serve "guess?high=9&turns=4"

        holdfast rl environment serve python:reverse.py:ReverseEnvironment --sessions 16

    Runs play there with servers = 0 and addresses = \\["ws://HOST:PORT"] in their table \\[environment]; without
    addresses a run starts servers of its own. curl http://HOST:PORT/health tells how many sessions are in use.

    A server answers all that reach its port: leave it on 127.0.0.1 unless the network is yours.
    """
    from contextlib import suppress

    from holdfast.ft.control import event_loop
    from holdfast.rl.environments.server import serve as serving

    listens = False

    def started(url: str) -> None:
        nonlocal listens
        listens = True
        typer.echo(f"{name}: {url}, {sessions} sessions; Ctrl-C ends it")

    try:
        with suppress(KeyboardInterrupt):
            event_loop.run(serving(name, host, port, sessions=sessions, lease=lease, timeout=timeout, on_start=started))
    except (OSError, UnicodeError) as error:
        if listens:
            raise
        why = f"cannot listen on --host {host} --port {port}: {getattr(error, 'strerror', None) or error}"
        typer.echo(f"holdfast rl environment serve: {why}; choose another", err=True)
        raise typer.Exit(CANNOT_BEGIN) from error


app.add_typer(environment_app, name="environment")
