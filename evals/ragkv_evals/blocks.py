"""Answers on blocks of documents beside those on the whole prompt: the same examples, the same budget, paired.

The documents of an example are read beforehand, as at index time; what is timed is reading the question on them. The
whole prompt is read once for the full cache and for SnapKV, and all modes of an example are decoded as one batch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ragkv.cite_grammar import citation_constraint
from ragkv.compare import prefill_many
from ragkv.config import SamplingParams
from ragkv.document_blocks import DocumentBlocks, encode_each, prefill_documents, read_documents
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.kv_store import KVStore
from ragkv.policies import FullKV
from ragkv.prefill import Prefilled
from ragkv.sampling import Constraint
from ragkv_evals.paired import Answered
from ragkv_evals.prompts import encode
from ragkv_evals.tasks.base import Example, Figures

FULL, SNAPKV = "full", "full + SnapKV"

Score = Callable[[Example, str], Figures]


def answer(
    engine: Engine,
    example: Example,
    score: Score,
    variants: Sequence[DocumentBlocks],
    max_tokens: int,
    whole_prompts: KVStore | None = None,
    must_cite: bool = False,
) -> list[Answered]:
    """The example on the full cache, with SnapKV, and with SnapKV on blocks in each variant.

    Args:
        engine: with the SnapKV of all modes, and a store for blocks.
        whole_prompts: a store for whole prompts, apart from that of the blocks, if the next examples may have the same
            documents; only the first of them tells how long a whole prompt takes.
        must_cite: hold replies to the form of the citing prompt by a grammar.

    Raises:
        ConfigError: the example has no numbered documents, or they are more than the engine's store holds.
    """
    if example.prompt is None:
        raise ConfigError(f"example {example.id} has no numbered documents: choose a task that has")
    documents, prompt, policies = example.documents, example.prompt, [FullKV(), engine.policy]
    whole = encode(engine.tokenizer, example)
    read_documents(engine, documents, prompt)
    alone = list(encode_each(engine.tokenizer, prompt.messages(example.question, documents)))
    read = _timed([FULL, SNAPKV], lambda: prefill_many(engine.model, whole, policies, store=whole_prompts))
    if read[0].prefilled.cache_read_tokens > min(span.start for span in whole.spans if span.kind == "document"):
        read = [replace(each, seconds=None, computed=len(whole)) for each in read]
    for blocks in variants:

        def on_blocks(blocks: DocumentBlocks = blocks) -> list[Prefilled]:
            on_stored = prefill_documents(engine, whole, alone, blocks)
            if on_stored.cache_creation_tokens:
                raise ConfigError(f"the store has no room for all documents of {len(whole)} tokens: raise its bound")
            return [on_stored]

        read += _timed([_name(blocks)], on_blocks)

    def constraint() -> Constraint | None:
        eos = engine.loaded.eos_token_ids
        return citation_constraint(engine.tokenizer, documents, eos_token_ids=eos) if must_cite else None

    replies = engine.replies(
        [(whole, each.prefilled) for each in read],
        SamplingParams(max_tokens=max_tokens),
        constraints=[constraint() for _ in read],
    )
    return [
        Answered(
            example=example.id,
            mode=each.mode,
            reply=reply.text.strip(),
            figures=score(example, reply.text.strip()),
            ttft_s=each.seconds,
            prompt_tokens=len(whole),
            computed_tokens=each.computed,
        )
        for each, reply in zip(read, replies, strict=True)
    ]


def _name(blocks: DocumentBlocks) -> str:
    how_many = f"{blocks.recompute:.0%}" if blocks.recompute <= 1 else f"{blocks.recompute:g} tokens"
    return f"blocks, {how_many} recomputed"


@dataclass(frozen=True)
class _Read:
    mode: str
    prefilled: Prefilled
    seconds: float | None
    computed: int


def _timed(modes: Sequence[str], read: Callable[[], list[Prefilled]]) -> list[_Read]:
    started = time.perf_counter()
    prefilled = read()
    int(prefilled[0].logits.argmax())  # waits for a GPU
    seconds = time.perf_counter() - started
    return [
        _Read(mode, each, seconds, each.length - each.cache_read_tokens)
        for mode, each in zip(modes, prefilled, strict=True)
    ]
