"""Answers on blocks of documents beside those on the whole prompt: the same examples, the same budget, paired.

The documents of an example are read beforehand, as at index time; what is timed is reading the question on them. The
whole prompt is read once for the full cache and for SnapKV, and all modes of an example are decoded as one batch.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ragkv.compare import prefill_many
from ragkv.config import SamplingParams
from ragkv.document_blocks import DocumentBlocks, prefill_documents, read_documents
from ragkv.engine import Engine
from ragkv.errors import ConfigError, DocumentError
from ragkv.kv_store import KVStore
from ragkv.models import LoadedModel
from ragkv.policies import FullKV, SnapKV
from ragkv.prefill import Prefilled
from ragkv_evals.paired import Answered
from ragkv_evals.prompts import encode
from ragkv_evals.tasks.base import Example, Figures

FULL, SNAPKV = "full", "full + SnapKV"

Score = Callable[[Example, str], Figures]


def answer(
    loaded: LoadedModel, example: Example, score: Score, budget: int, shares: Sequence[float], max_tokens: int
) -> list[Answered]:
    """The example on the full cache, with SnapKV, and with SnapKV on blocks for each share recomputed.

    Raises:
        ConfigError: the example has no numbered documents.
    """
    if example.prompt is None:
        raise ConfigError(f"example {example.id} has no numbered documents: choose a task that has")
    documents, prompt, snapkv = example.documents, example.prompt, SnapKV(budget)
    engine = Engine(loaded, snapkv, store=KVStore(2**40))
    whole = encode(engine.tokenizer, example)
    read_documents(engine, documents, prompt)

    read = _timed([FULL, SNAPKV], lambda: prefill_many(loaded.model, whole, [FullKV(), snapkv]))
    for share in shares:

        def on_blocks(share: float = share) -> list[Prefilled]:
            return [prefill_documents(engine, whole, documents, DocumentBlocks(share), prompt=prompt)]

        read += _timed([f"blocks, {share:.0%} recomputed"], on_blocks)
    replies = engine.replies([(whole, each.prefilled) for each in read], SamplingParams(max_tokens=max_tokens))
    return [
        Answered(
            example=example.id,
            mode=each.mode,
            reply=reply.text.strip(),
            figures=score(example, reply.text.strip()),
            ttft_s=each.seconds,
            prompt_tokens=len(whole),
            computed_tokens=len(whole) - each.prefilled.cache_read_tokens,
        )
        for each, reply in zip(read, replies, strict=True)
    ]


@dataclass(frozen=True)
class _Read:
    mode: str
    prefilled: Prefilled
    seconds: float


def _timed(modes: Sequence[str], read: Callable[[], list[Prefilled]]) -> list[_Read]:
    started = time.perf_counter()
    prefilled = read()
    int(prefilled[0].logits.argmax())  # waits for a GPU
    seconds = time.perf_counter() - started
    return [_Read(mode, each, seconds) for mode, each in zip(modes, prefilled, strict=True)]


class AnswerFile:
    """The answers of a benchmark, one line for each example, so that one which was stopped goes on where it was.

    Args:
        path: made when the first answers are added; None keeps them in memory only.

    Raises:
        DocumentError: the file holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self.answers = path, list[Answered]()
        lines = [] if path is None or not path.exists() else path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # a killed run may leave a part of the last one
        try:
            self.answers = [Answered(**row) for line in whole for row in json.loads(line)]
        except (ValueError, TypeError) as error:
            raise DocumentError(f"{path}: no answers of this version ({error}); use another --out folder") from error
        if path is not None and len(whole) < len(lines):
            path.write_text("".join(whole), encoding="utf-8")

    def __contains__(self, example: str) -> bool:
        return any(each.example == example for each in self.answers)

    def add(self, answers: Sequence[Answered]) -> None:
        """Write all modes of an example."""
        self.answers += answers
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([asdict(each) for each in answers]) + "\n")
