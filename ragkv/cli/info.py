"""`ragkv info`: what models run on here, and what would be faster."""

import json
import sys
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragkv.cli.output import printable, write


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show device, dtype, attention, memory, versions and caches, and what would be faster."""
    from ragkv.environment import Environment

    environment = Environment.detect()
    if as_json:
        write(json.dumps(environment.to_json()) + "\n")
        return
    console = Console(file=sys.stdout, highlight=False)
    table = Table(box=SIMPLE, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in environment.rows():
        table.add_row(name, Text(printable(value)))
    console.print(table)
    for advice in environment.advice():
        console.print(Text(f"• {advice}"))
