"""`holdfast new-plugin`: writes a package with a backend that works, to be changed into another one."""

from __future__ import annotations

import importlib.metadata
import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from holdfast.harness.command_line import writing

TEMPLATES = Path(__file__).with_name("plugin_template")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def new_plugin(
    name: Annotated[str, typer.Argument(help="The name of the backend, as users will write it.")],
    directory: Annotated[
        Path | None, typer.Option(help="The folder to write, which must not exist. Default: holdfast-NAME.")
    ] = None,
) -> None:
    """Write a package with a backend that works: change its transport into yours.

    [bold]Examples[/bold]

        holdfast new-plugin mybackend

        holdfast new-plugin mybackend --directory ~/src/mybackend

    The package has a pyproject.toml with the entry point, a module with a
    transport that sends files through a shared folder, and a test that
    runs the conformance kit. Install it, and holdfast finds it:

        pip install -e holdfast-mybackend

        holdfast backends

        pytest holdfast-mybackend

    Exit status: 2 if the name is taken or no lower-case identifier, or if
    the folder exists or cannot be made; 74 if a file could not be written.
    """

    check_name(name)
    folder = Path(f"holdfast-{distribution(name)}") if directory is None else directory
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise typer.BadParameter(f"{folder} exists: name a folder that does not", param_hint="--directory") from error
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be made: {error}", param_hint="--directory") from error
    texts = files(name)
    with writing("holdfast new-plugin"):
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    typer.echo(f"wrote {', '.join(str(folder / file) for file in texts)}\n")
    typer.echo(f"    pip install -e {folder}\n    holdfast backends\n    pytest {folder}")


def check_name(name: str) -> None:
    """Raise BadParameter if a backend of a new plugin cannot be called `name`."""
    from holdfast.comms.plugins.registry import GROUP, registry

    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise typer.BadParameter(f"{name!r} is no identifier of lower-case letters, digits and '_'", param_hint="NAME")
    if name in registry().backends:
        raise typer.BadParameter(f"there is a backend {name} already: see holdfast backends", param_hint="NAME")
    if name in {point.name for point in importlib.metadata.entry_points(group=GROUP)}:
        raise typer.BadParameter(f"there is a plugin {name} already: see holdfast backends", param_hint="NAME")


def files(name: str) -> dict[str, str]:
    """The text of each file of the package, by file name: the backend `filebox`, under another name."""
    words = {
        "holdfast-filebox": f"holdfast-{distribution(name)}",
        "Filebox": name.title().replace("_", ""),
        "filebox": name,
    }

    def named(text: str) -> str:
        return re.sub("|".join(words), lambda found: words[found[0]], text)

    return {named(each.stem): named(each.read_text(encoding="utf-8")) for each in sorted(TEMPLATES.glob("*.template"))}


def distribution(name: str) -> str:
    """The part of the distribution's name after `holdfast-`."""
    return name.replace("_", "-")
