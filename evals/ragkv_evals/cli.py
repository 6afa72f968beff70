"""`ragkv-eval`: measures ragkv. Tables and progress go to stderr, the last line of stdout is one JSON object."""

import sys

import typer

from ragkv.errors import RagkvError
from ragkv_evals import speed_command
from ragkv_evals.console import console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure ragkv: its speed beside other systems.",
)
app.command()(speed_command.speed)
app.command()(speed_command.peers)


def main() -> None:
    """Run the command; an error made on purpose is one line and exit code 2."""
    try:
        app()
    except RagkvError as error:
        console.print(f"ragkv-eval: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
