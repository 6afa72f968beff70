"""Time to the first token of questions about the same documents: with no store, and with one in each of its states.

Every repeat asks four questions at each length: without a store; with an empty one; with K/V in memory; and with K/V in
a folder alone, as after a restart, whose files have left the system's cache where the system can be told so. Medians.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ragkv import peak_memory
from ragkv.chat import Prompt, Span
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.kv_store import KVStore
from ragkv.models import LoadedModel
from ragkv.policies import Policy
from ragkv.reply import Stats

MODES = ("no store", "first question", "second question, memory", "after a restart, disk")
QUESTION_TOKENS = 48

Notify = Callable[[str], None]


@dataclass
class Cell:
    """All that is measured of one mode at one length.

    Attributes:
        peak_bytes: most memory in use, the model's weights included; None where the system does not tell.
    """

    mode: str
    length: int
    stats: list[Stats] = field(default_factory=list)
    peak_bytes: list[int | None] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return median(stats.ttft_s for stats in self.stats)


def measure(
    loaded: LoadedModel,
    policy: Callable[[int], Policy],
    tokens: Sequence[int],
    lengths: Sequence[int],
    repeats: int,
    notify: Notify = lambda text: None,
) -> list[Cell]:
    """Measure every mode at every length.

    Args:
        policy: made for each length.
        tokens: at least the longest length and two questions more.
        lengths: of the prompts in tokens, questions included.
    """
    cells = [Cell(mode, length) for length in lengths for mode in MODES]
    notify("warming up")
    _ask(Engine(loaded, policy(lengths[0])), tokens, min(lengths[0], 512), 0)
    for repeat in range(repeats):
        for start, length in zip(range(0, len(cells), len(MODES)), lengths, strict=True):
            with TemporaryDirectory() as folder:
                states = zip(cells[start : start + len(MODES)], _stores(Path(folder)), strict=True)
                for number, (cell, store) in enumerate(states):
                    notify(f"repeat {repeat + 1}/{repeats}: {length} tokens, {cell.mode}")
                    peak_memory.reset(loaded.model.device)
                    cell.stats.append(_ask(Engine(loaded, policy(length), store=store), tokens, length, number))
                    cell.peak_bytes.append(peak_memory.peak(loaded.model.device))
    return cells


def _stores(folder: Path) -> Iterator[KVStore | None]:
    """The store of each mode, with room for everything."""
    yield None
    store = KVStore(2**40, folder, 2**40)
    yield store
    yield store
    del store
    _forget_pages(folder)
    yield KVStore(0, folder, 2**40)


def _ask(engine: Engine, tokens: Sequence[int], length: int, number: int) -> Stats:
    """The first token of the reply to question `number`: other tokens behind the same documents."""
    documents = length - QUESTION_TOKENS
    start = documents + number * QUESTION_TOKENS // len(MODES)
    ids = (*tokens[:documents], *reversed(tokens[start : start + QUESTION_TOKENS]))
    prompt = Prompt(ids, (Span(documents, length, "question"),))
    return engine.generate([prompt], SamplingParams(max_tokens=1))[0].stats


def _forget_pages(folder: Path) -> None:
    """Let the system drop what it holds of the files, so that they are read from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
