"""`ragkv index`: documents embedded once and saved in a folder that `ragkv ask` takes as its path."""

from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli import options
from ragkv.cli.engines import quieten
from ragkv.cli.output import ProgressBars, say, write
from ragkv.cli.sources import check_paths, open_index


def index(
    paths: options.PathsArgument,
    out: Annotated[Path, typer.Option(help="The folder to write; an index that is there is replaced.")],
    skip_unreadable: options.SkipUnreadableOption = False,
) -> None:
    """Index documents and save the index in a folder, to be given to `ragkv ask`."""
    check_paths(paths)
    quieten()
    with ProgressBars() as progress:
        built = open_index(paths, progress, skip_unreadable=skip_unreadable)
    built.save(out)
    say(f"{len(built):,} passages indexed")
    write(f"{out}\n")
