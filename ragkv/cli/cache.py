"""`ragkv cache`: what the folder of kept K/V holds and did, and how to empty it."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ragkv.cli.output import printable, write
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from ragkv.kv_store.folder_files import Contents

app = typer.Typer(help="Show or clear the K/V kept for prompts that begin alike.", no_args_is_help=True)

FolderArgument = Annotated[
    Path, typer.Argument(metavar="KV_DIR", help="The folder given as --kv-dir or kv_dir.", show_default=False)
]


@app.command()
def info(
    kv_dir: FolderArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show what a folder holds, by model and namespace, and how often it was of use."""
    from ragkv.kv_store.folder_files import contents
    from ragkv.kv_store.usage import read_usage

    _check(kv_dir)
    rows, usage = contents(kv_dir), asdict(read_usage(kv_dir))
    total = {"blocks": sum(row.blocks for row in rows), "bytes": sum(row.bytes for row in rows)}
    if as_json:
        write(json.dumps({"kv_dir": str(kv_dir), **total, **usage, "contents": [asdict(row) for row in rows]}) + "\n")
        return
    console = Console(file=sys.stdout, highlight=False)
    console.print(_table(rows))
    counts: dict[str, Any] = {**total, **usage}
    console.print(Text(", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())))


@app.command()
def clear(
    kv_dir: FolderArgument,
    namespace: Annotated[str | None, typer.Option(help="Only what is of this namespace.", show_default="all")] = None,
) -> None:
    """Remove the K/V in a folder, and nothing else that may be there; prints how many bytes that freed."""
    from ragkv.kv_store.folder import BlockFolder
    from ragkv.kv_store.folder_files import contents

    _check(kv_dir)
    before = sum(row.bytes for row in contents(kv_dir))
    BlockFolder(kv_dir, 0).clear(namespace)
    write(f"{before - sum(row.bytes for row in contents(kv_dir))}\n")


def _check(kv_dir: Path) -> None:
    if not kv_dir.is_dir():
        raise ConfigError(f"{kv_dir}: no such folder: give the one that --kv-dir or kv_dir named")


def _table(rows: "list[Contents]") -> Table:
    table = Table("model", "namespace", box=SIMPLE)
    for name in ("blocks", "size", "last used"):
        table.add_column(name, justify="right")
    for row in rows:
        names = (Text(printable(name)) for name in (row.model, row.namespace))
        table.add_row(*names, f"{row.blocks:,}", decimal(row.bytes), row.last_used)
    return table
