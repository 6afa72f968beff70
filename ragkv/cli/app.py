"""The commands by name."""

from importlib.metadata import version
from typing import Annotated

import typer

from ragkv.cli import cache, models
from ragkv.cli.ask import ask
from ragkv.cli.chat import chat
from ragkv.cli.explain import explain
from ragkv.cli.index import index
from ragkv.cli.info import info

app = typer.Typer(
    name="ragkv",
    help="Cited answers from your documents, by local models on a compressed KV cache.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(ask)
app.command()(chat)
app.command()(index)
app.command()(explain)
app.add_typer(models.app, name="models")
app.add_typer(cache.app, name="cache")
app.command()(info)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ragkv {version('ragkv')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
