"""`ragkv chat`: a conversation without end, typed or of the lines of stdin; replies on stdout, the rest on stderr.

Ctrl-C ends the reply, not the session; the end of the input (Ctrl-D) ends that.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from ragkv.cli import options
from ragkv.cli.engines import check_model, load_engine, quieten
from ragkv.cli.output import ProgressBars, say, trimmed, write
from ragkv.cli.sources import load_embedder
from ragkv.errors import Cancelled, ConfigError, PromptTooLong

if TYPE_CHECKING:
    from ragkv.config import SamplingParams
    from ragkv.options import ChatOptions
    from ragkv.streaming.session import Session
    from ragkv.streaming.turns import MemoryReport

_CACHE = "KV cache"
_WINDOW_LENGTH, _NUM_SINK_TOKENS = 2044, 4


def chat(
    system: Annotated[str, typer.Option(help="System message; it is never forgotten.")] = "",
    thread: Annotated[
        str,
        typer.Option(
            help="Keep what leaves the cache in the long-term memory of this name, and recall it.", metavar="NAME"
        ),
    ] = "",
    session_file: Annotated[
        Path | None,
        typer.Option("--session", help="Go on with the session in this file, and save it there at the end."),
    ] = None,
    window_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the conversation that are remembered.",
            rich_help_panel=_CACHE,
            show_default=str(_WINDOW_LENGTH),
        ),
    ] = None,
    num_sink_tokens: Annotated[
        int | None,
        typer.Option(
            help="First tokens that stay for good.", rich_help_panel=_CACHE, show_default=str(_NUM_SINK_TOKENS)
        ),
    ] = None,
    model: options.ModelOption = options.DEFAULT_MODEL,
    dtype: options.DTypeOption = None,
    device: options.DeviceOption = None,
    max_tokens: options.MaxTokensOption = 256,
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = None,
) -> None:
    """Chat on a cache of constant size: the oldest turns leave it, whole, when it is full."""
    chosen = options.chosen(
        "full", model=model, dtype=dtype, device=device, max_tokens=max_tokens, temperature=temperature, seed=seed
    )
    session = _session(chosen, system, thread, session_file, window_length, num_sink_tokens)
    with ExitStack() as at_end:  # whatever brings it about, what was said is not lost
        at_end.callback(session.flush)
        if session_file is not None:
            at_end.callback(session.save, session_file)
        for line in _lines():
            _answer(session, line, chosen.sampling())


def _session(
    chosen: "ChatOptions",
    system: str,
    thread: str,
    file: Path | None,
    window_length: int | None,
    num_sink_tokens: int | None,
) -> "Session":
    """A new session, or the one in the file."""
    check_model(chosen.model)
    quieten()
    from ragkv.policies import StreamingLLM
    from ragkv.streaming.long_term import MemoryStore
    from ragkv.streaming.session import Session

    given = {"num_sink_tokens": num_sink_tokens, "window_length": window_length}
    default = StreamingLLM(_NUM_SINK_TOKENS, _WINDOW_LENGTH)
    policy = replace(default, **{name: value for name, value in given.items() if value is not None})
    with ProgressBars() as progress:
        engine = load_engine(chosen, progress)
        memory = MemoryStore(load_embedder(progress)).thread(thread) if thread else None
    if file is None or not file.exists():
        return engine.session(policy, system=system, memory=memory)
    session = Session.load(engine, file, memory=memory)
    if system and system != session.transcript.system:
        raise ConfigError(f"--system: the session in {file} has another system message; leave it out, or start anew")
    for name, value in given.items():
        if value not in (None, has := getattr(session.layout.policy, name)):
            option = f"--{name.replace('_', '-')}={value}"
            raise ConfigError(f"{option}: the session in {file} has {has}; leave it out, or start anew")
    say(status(session.report()), "dim")
    return session


def _lines() -> Iterator[str]:
    """What is typed, or the lines of a stdin that is no terminal, without blank ones."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            write("\n")
            continue
        if line.strip():
            yield line


def _answer(session: "Session", line: str, sampling: "SamplingParams") -> None:
    """Write the reply to a line, and the status behind it."""
    session.append({"role": "user", "content": line})
    try:
        with _interruptible() as cancel, closing(session.stream(sampling, cancel=cancel)) as chunks:
            for text in trimmed(chunk.text for chunk in chunks):
                write(text)
        write("\n")
    except PromptTooLong as error:
        session.discard()
        say(f"error: {error} (--window-length, --max-tokens)", "red")
        return
    except Cancelled:
        session.discard()
    say(status(session.report()), "dim")


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets."""
    cancel = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: cancel.set())
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


def status(report: "MemoryReport") -> str:
    """The status line: what has been seen, what it costs, what is remembered, what was recalled."""
    remembered, dropped = len(report.remembered_turns), report.turns - len(report.remembered_turns)
    parts = [
        f"{report.tokens_seen:,} tokens seen",
        f"{report.tokens_held:,} of {report.capacity:,} held ({decimal(report.cache_bytes)})",
        f"{remembered} of {report.turns} turns remembered" if dropped else f"all {remembered} turns remembered",
        f"{len(report.recalled_turns)} recalled" if report.recalled_turns else "",
    ]
    return " · ".join(filter(None, parts))
