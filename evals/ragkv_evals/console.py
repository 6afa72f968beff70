"""What every evaluation shows and leaves behind: a console on stderr, and one JSON object."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)


def write_result(result: Mapping[str, object], name: str, out: Path | None = None) -> None:
    """Print the result as one line of JSON on stdout, and write it to `out`/`name`.json if a folder is given."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
