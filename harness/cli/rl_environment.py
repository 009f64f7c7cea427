"""The command `holdfast rl environment serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.ft.console.command_line import CommandGroup

app = CommandGroup(help="Environments that runs play in.", no_args_is_help=True)


@app.command()
def serve(
    name: Annotated[str, typer.Argument(help="Such as guess, 2048?goal=64 or python:FILE.py:NAME.")],
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
    import asyncio
    from contextlib import suppress

    from holdfast.rl.environments.serve import serve as serving

    def started(url: str) -> None:
        typer.echo(f"{name}: {url}, {sessions} sessions; Ctrl-C ends it")

    with suppress(KeyboardInterrupt):
        asyncio.run(serving(name, host, port, sessions=sessions, lease=lease, timeout=timeout, on_start=started))
