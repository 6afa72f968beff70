"""Answers on blocks of documents beside those on the whole prompt: the same examples, the same budget, paired.

The documents of an example are read beforehand, as at index time; what is timed is reading the question on them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ragkv.config import SamplingParams
from ragkv.document_blocks import DocumentBlocks, prefill_documents, read_documents
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.kv_store import KVStore
from ragkv.models import LoadedModel
from ragkv.policies import FullKV, SnapKV
from ragkv.prefill import Prefilled, prefill
from ragkv_evals.prompts import encode
from ragkv_evals.tasks.base import Example

FULL, SNAPKV = "full", "full + SnapKV"

Score = Callable[[Example, str], Mapping[str, float]]


@dataclass(frozen=True)
class Answered:
    """One example answered in one mode.

    Attributes:
        recompute: share of the documents' tokens computed anew; None where the prompt was read whole.
        computed_tokens: tokens of the prompt that were computed for the question.
    """

    example: str
    mode: str
    recompute: float | None
    reply: str
    figures: Mapping[str, float]
    ttft_s: float
    prompt_tokens: int
    computed_tokens: int


def answer(
    loaded: LoadedModel, example: Example, score: Score, budget: int, shares: Sequence[float], max_tokens: int
) -> Iterator[Answered]:
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

    def on_blocks(share: float) -> Callable[[], Prefilled]:
        return lambda: prefill_documents(engine, whole, documents, DocumentBlocks(share), prompt=prompt)

    modes: list[tuple[str, float | None, Callable[[], Prefilled]]] = [
        (FULL, None, lambda: prefill(loaded.model, whole, FullKV())),
        (SNAPKV, None, lambda: prefill(loaded.model, whole, snapkv)),
        *((f"blocks, {share:.0%} recomputed", share, on_blocks(share)) for share in shares),
    ]
    for mode, share, read in modes:
        started = time.perf_counter()
        prefilled = read()
        int(prefilled.logits.argmax())  # waits for a GPU
        ttft_s = time.perf_counter() - started
        computed = len(whole) - prefilled.cache_read_tokens
        reply = engine.reply(whole, prefilled, SamplingParams(max_tokens=max_tokens)).text.strip()
        yield Answered(example.id, mode, share, reply, score(example, reply), ttft_s, len(whole), computed)
