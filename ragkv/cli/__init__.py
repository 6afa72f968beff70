"""The command `ragkv`: arguments in, answer on stdout, everything else on stderr.

Bad input is one line on stderr and exit code 2; Ctrl-C is 130; whatever is nobody's mistake shows its traceback.
Modules here import torch and its friends only inside functions, so that `ragkv --help` is quick.
"""

import io
import sys
import warnings
from collections.abc import Sequence

import typer

from ragkv.cli.app import app
from ragkv.cli.output import say
from ragkv.errors import RagkvError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit; `arguments` are the process's own unless given."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    given = sys.argv[1:] if arguments is None else list(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", "yellow")
        sys.exit(_run(given or ["--help"]))


def _run(arguments: list[str]) -> int:
    try:
        code = app(arguments, prog_name="ragkv", standalone_mode=False)
    except RagkvError as error:
        say(f"error: {error}", "red")
        return 2
    except typer.TyperException as error:
        say(f"error: {error.format_message()} (see ragkv --help)", "red")
        return error.exit_code
    if code == INTERRUPTED:
        say("interrupted", "red")
    return code or 0
