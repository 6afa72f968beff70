"""What `ragkv ask` prints on stderr once the answer is there: sources cited, costs, and what deserves a warning."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ragkv.citations import find_markers
from ragkv.cli.output import one_line, say, stderr

if TYPE_CHECKING:
    from ragkv.answer import Answer
    from ragkv.reply import Stats


def report(answer: "Answer") -> None:
    """Print sources, table and warnings."""
    console = stderr()
    console.print()
    for number, document in zip(answer.citations, answer.cited_documents, strict=True):
        source = f" — {one_line(document.source)}" if document.source else ""
        console.print(Text.assemble((f"[{number}]", "bold cyan"), f" {one_line(document.title)}{source}"))
    console.print(costs(answer))
    for warning in warnings(answer):
        say(f"warning: {warning}", "yellow")


def costs(answer: "Answer") -> Table:
    """The table below the answer."""
    stats = answer.stats
    table = Table(box=SIMPLE, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_row("prompt tokens", f"{stats.prompt_tokens:,}")
    if stats.cache_read_tokens:
        table.add_row("of them not read again", f"{stats.cache_read_tokens:,}")
    table.add_row("documents", f"{len(answer.documents):,}")
    table.add_row("documents cited", f"{len(answer.citations):,}")
    table.add_row("time to first token", f"{stats.ttft_s:.1f} s")
    table.add_row("tokens/s", f"{stats.decode_tokens_per_s:.1f}" if stats.decode_tokens_per_s else "—")
    table.add_row("KV cache", kv_cache(stats))
    if stats.peak_memory_bytes is not None:
        table.add_row("peak memory", decimal(stats.peak_memory_bytes))
    return table


def kv_cache(stats: "Stats") -> str:
    """Bytes of K/V before and after compression, in words."""
    full, kept = stats.kv_bytes_full, stats.kv_bytes_kept
    if kept == full:
        return f"{decimal(full)}, all kept"
    return f"{decimal(full)} → {decimal(kept)} ({full / kept:.1f}× smaller)"


def warnings(answer: "Answer") -> Iterator[str]:
    """What the reader of the answer should know."""
    stats = answer.stats
    if answer.finish_reason == "length":
        yield f"the answer was cut at {stats.completion_tokens} tokens: raise --max-tokens"
    if not answer.citations:
        yield "the answer cites no document: check it against the sources"
    if answer.invalid_citations:
        numbers = ", ".join(map(str, answer.invalid_citations))
        yield f"the answer cites documents that do not exist: {numbers}"
    written = {number for marker in find_markers(answer.text) for number in marker.numbers}
    if others := sorted(written.difference(answer.citations, answer.invalid_citations)):
        numbers = ", ".join(map(str, others))
        yield f"the answer gives titles with the numbers of other documents ({numbers}); the sources go by the titles"
    if answer.dropped_documents:
        titles = "; ".join(one_line(document.title) or document.id for document in answer.dropped_documents)
        yield f"{len(answer.dropped_documents)} documents did not fit into the context and were left out: {titles}"
    if stats.unprotected_tokens:
        yield (
            f"{stats.unprotected_tokens:,} tokens of instructions and document headers had no room in the budget and "
            "may have been evicted: raise --max-capacity-prompt or lower --context-tokens"
        )
