"""`ragkv-eval`: measures ragkv. Tables and progress go to stderr, the last line of stdout is one JSON object."""

import sys

import typer

from ragkv.errors import RagkvError
from ragkv_evals import blocks_command, memory_command, order_command, reuse_command, speed_command, streaming_command
from ragkv_evals.console import console
from ragkv_evals.peers.command import compare_peers
from ragkv_evals.report.command import report
from ragkv_evals.task_command import command_for
from ragkv_evals.tasks import TASKS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure ragkv: what compression costs and what it buys, and its speed beside other systems.",
)
for name, task in TASKS.items():
    app.command(name, help=task.help)(command_for(task))
app.command()(report)
app.command()(compare_peers)
app.command()(speed_command.speed)
app.command()(speed_command.peers)
app.command()(streaming_command.streaming)
app.command()(memory_command.memory)
app.command()(reuse_command.reuse)
app.command()(blocks_command.blocks)
app.command()(order_command.order)


def main() -> None:
    """Run the command; an error made on purpose is one line and exit code 2."""
    try:
        app()
    except RagkvError as error:
        console.print(f"ragkv-eval: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
