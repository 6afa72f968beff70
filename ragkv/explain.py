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

from ragkv.cache import compressible
from ragkv.chat import Prompt, encode_chat
from ragkv.citations import find_markers, split_valid
from ragkv.config import SamplingParams
from ragkv.decode import Decoder
from ragkv.detokenize import TextStream
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.errors import PromptTooLong
from ragkv.policies import Policy
from ragkv.prefill import LayerCallback, Prefilled, prefill
from ragkv.prompt import CitePrompt
from ragkv.sampling import Sampler


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
    prompt_tokens: int
    kept_tokens: int
    window_size: int
    unprotected_tokens: int
    kv_bytes_full: int
    kv_bytes_kept: int


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
    room = engine.loaded.context_length - sampling.max_tokens
    if len(encoded) > room:
        raise PromptTooLong(
            f"a prompt of {len(encoded)} tokens and max_tokens={sampling.max_tokens} do not fit into the "
            f"{engine.loaded.context_length} tokens of context of {engine.loaded.name}: give fewer documents"
        )
    read = prefill(
        engine.model, encoded, policy or engine.policy, chunk_size=engine.prefill_chunk_size, on_layer=on_layer
    )
    counts, heads = kept_counts(read.cache, len(encoded))
    kept = tuple(_kept_document(engine.tokenizer, encoded, n, counts, heads) for n in range(1, len(documents) + 1))
    answer = _reply(engine, encoded, read, sampling).strip()
    valid, invalid = split_valid(find_markers(answer), len(documents))
    return Explanation(
        question=question.strip(),
        answer=answer,
        citations=tuple(valid),
        invalid_citations=tuple(invalid),
        heads=heads,
        kept=kept,
        prompt_tokens=len(encoded),
        kept_tokens=read.kept_tokens,
        window_size=read.window_size,
        unprotected_tokens=read.unprotected_tokens,
        kv_bytes_full=read.kv_bytes_full,
        kv_bytes_kept=read.kv_bytes_kept,
    )


def kept_counts(cache: Cache, length: int) -> tuple[Tensor, int]:
    """In how many heads each prompt token is kept, right after the prefill of one prompt.

    Returns:
        Counts (length,) int64, and the number of heads: KV heads of all full-attention layers.
    """
    counts, heads = torch.zeros(length, dtype=torch.int64), 0
    for _, layer in compressible(cache):
        kv_heads = layer.keys.shape[1]
        heads += kv_heads
        if layer.positions is None:
            counts += kv_heads
        else:
            counts += torch.bincount(layer.positions.flatten().cpu(), minlength=length)
    return counts, heads


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


def _reply(engine: Engine, prompt: Prompt, read: Prefilled, sampling: SamplingParams) -> str:
    decoder, sampler = Decoder(engine.model, [read]), Sampler(sampling, prompt.ids)
    text = TextStream(engine.tokenizer, sampling.stop)
    for remaining in reversed(range(sampling.max_tokens)):
        token = sampler(decoder.logits[0])
        if token in engine.loaded.eos_token_ids:
            break
        text.push(token)
        if text.stopped or not remaining:
            break
        decoder.step([token])
    text.finish()
    return text.text
