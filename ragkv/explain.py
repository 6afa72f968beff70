"""Which tokens of the documents a question kept: per token, the number of KV heads in whose cache it survived.

The answer is decoded from the very prefill whose kept positions are shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ragkv.chat import Prompt, encode_chat
from ragkv.citations import cited_numbers
from ragkv.config import SamplingParams
from ragkv.detokenize import TextStream
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.policies import Policy
from ragkv.prefill import LayerCallback
from ragkv.prompt import CitePrompt
from ragkv.reply import Stats
from ragkv.survival import kept_masks


@dataclass(frozen=True)
class Piece:
    """Text that one or several tokens stand for, and in how many heads (at most) they were kept."""

    text: str
    kept: int


@dataclass(frozen=True)
class KeptDocument:
    """What is left of a document: its text in pieces, and the share of its K/V entries that were kept, 0 to 1."""

    pieces: tuple[Piece, ...]
    share: float


@dataclass(frozen=True)
class Explanation:
    """One question, its answer, and what was kept for it.

    Attributes:
        heads: layers with full attention times KV heads; a token kept everywhere counts this many.
        kept: one entry for each document, in the order of the prompt.
        citations, invalid_citations: numbers of documents, 1-based, and numbers that no document has.
    """

    question: str
    answer: str
    citations: tuple[int, ...]
    invalid_citations: tuple[int, ...]
    heads: int
    kept: tuple[KeptDocument, ...]
    stats: Stats


def explain(
    engine: Engine,
    question: str,
    documents: Sequence[Document],
    sampling: SamplingParams = SamplingParams(max_tokens=128),
    *,
    prompt: CitePrompt = CitePrompt(),
    policy: Policy | None = None,
    on_layer: LayerCallback | None = None,
) -> Explanation:
    """Answer a question as `ragkv.answer.ask` does, and show what its prompt kept.

    Raises:
        ConfigError: the question is empty.
        PromptTooLong: the documents do not fit into the model's context.
    """
    encoded = encode_chat(engine.tokenizer, prompt.messages(question, documents))
    seen: list[tuple[Tensor, int]] = []
    chunks = engine.stream(
        encoded,
        sampling,
        policy=policy,
        on_layer=on_layer,
        on_prefilled=lambda _, read: seen.append(kept_counts(read.cache, len(encoded))),
    )
    reply = next(chunk.completion for chunk in chunks if chunk.completion is not None)
    counts, heads = seen[0]
    valid, invalid = cited_numbers(reply.text, [document.title for document in documents])
    return Explanation(
        question=question.strip(),
        answer=reply.text.strip(),
        citations=tuple(valid),
        invalid_citations=tuple(invalid),
        heads=heads,
        kept=tuple(_kept_document(engine.tokenizer, encoded, n + 1, counts, heads) for n in range(len(documents))),
        stats=reply.stats,
    )


def kept_counts(cache: Cache, length: int) -> tuple[Tensor, int]:
    """In how many heads each prompt token is kept, right after the prefill of one prompt.

    Returns:
        Counts (length,) int64, and the number of heads: KV heads of all full-attention layers.
    """
    masks = kept_masks(cache, length)
    counts = sum((mask.sum(dim=0) for mask in masks), torch.zeros(length, dtype=torch.int64))
    return counts, sum(mask.shape[0] for mask in masks)


def _kept_document(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, number: int, counts: Tensor, heads: int
) -> KeptDocument:
    span = next(span for span in prompt.spans if span.kind == "document" and span.document == number)
    kept = counts[span.start : span.end].tolist()
    pieces = text_pieces(tokenizer, prompt.ids[span.start : span.end], kept)
    return KeptDocument(tuple(pieces), sum(kept) / (len(kept) * heads) if kept and heads else 0.0)


def text_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], kept: Sequence[int]) -> list[Piece]:
    """The text of these tokens, in pieces of equally kept ones; tokens that share a character stay together."""
    stream = TextStream(tokenizer)
    shown: list[tuple[str, int]] = []
    most = 0  # of the tokens whose text is not complete yet
    for token, count in zip(ids, kept, strict=True):
        most = max(most, count)
        if text := stream.push(token):
            shown.append((text, most))
            most = 0
    if rest := stream.finish():
        shown.append((rest, most))
    runs = groupby(shown, key=lambda piece: piece[1])
    return [Piece("".join(text for text, _ in run), count) for count, run in runs]
