"""K/V of documents that were read one by one, whatever others stand beside them: approximate, off by default.

A document is read once behind the prompt's beginning, and its K/V move to its place in each prompt. The question is
read on them and votes; headers, the documents' first tokens and the best-voted ones are then computed anew with full
attention (CacheBlend, arXiv 2405.16444, with SnapKV's votes; EPIC, arXiv 2410.15332, for first tokens).
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragkv.backend import bytes_per_token, rope_original_length, rope_regime
from ragkv.chat import Prompt, Span, encode_chat
from ragkv.documents import Document
from ragkv.engine import Engine, Read
from ragkv.errors import ConfigError
from ragkv.kv_store.blend import read_on_pieces, rotations_of
from ragkv.kv_store.joined import Piece
from ragkv.kv_store.store import KVStore, Prefix
from ragkv.messages import Message
from ragkv.policies import FullKV, Policy
from ragkv.policies.base import tokens_to_read
from ragkv.prefill import LayerCallback, Prefilled, prefill
from ragkv.progress import Progress
from ragkv.prompt import CitePrompt, each_alone


@dataclass(frozen=True)
class DocumentBlocks:
    """How much is computed anew for a question, of all documents but the first, which stands where it was read.

    Attributes:
        recompute: how many tokens, chosen by the votes of the question, however long the prompt. From 0 to 1 it is a
            share of them; 1 is exact (as far as the store is), and saves nothing but the first document.
        first_tokens: tokens at the beginning of each, whatever their votes. Headers always are.
    """

    recompute: float = 768
    first_tokens: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.recompute <= 1 or (self.recompute > 1 and float(self.recompute).is_integer())):
            raise ConfigError(f"recompute={self.recompute}: must be a share from 0 to 1, or a whole number of tokens")
        if self.first_tokens < 0:
            raise ConfigError(f"first_tokens={self.first_tokens}: must be at least 0")

    def voted_tokens(self, eligible: int) -> int:
        """How many of so many tokens are chosen by votes, if there are as many."""
        return round(self.recompute * eligible) if self.recompute <= 1 else int(self.recompute)


def read_documents(
    engine: Engine, documents: Sequence[Document], prompt: CitePrompt = CitePrompt(), progress: Progress | None = None
) -> int:
    """Put the K/V of documents into the engine's store, each behind the prompt's beginning; those there are skipped.

    Args:
        prompt: of the questions to come; other texts before the documents are another beginning.
        progress: told of "reading documents", in documents.

    Returns:
        Tokens that were computed.

    Raises:
        ConfigError: the engine has no store, or one that has no room, or its model's keys cannot be moved.
    """
    _check_movable(engine)
    computed = 0
    for done, alone in enumerate(_prompts(engine, documents, prompt), 1):
        stored = _stored(engine, alone)
        if not stored.complete:
            raise ConfigError(f"the store has no room for a document of {len(alone)} tokens: raise its bounds")
        computed += stored.computed
        if progress is not None:
            progress("reading documents", done, len(documents))
    return computed


def bytes_to_store(engine: Engine, documents: Sequence[Document], prompt: CitePrompt = CitePrompt()) -> int:
    """About so many bytes of K/V, as computed, has `read_documents` yet to put into the engine's store.

    What documents that are not there share at their beginning counts for each of them; files that are there, but turn
    out to be damaged, do not count.

    Raises:
        ConfigError: the engine has no store, or its model's keys cannot be moved.
    """
    _check_movable(engine)
    store, missing = _store_of(engine), 0
    for alone in _prompts(engine, documents, prompt):
        missing += len(alone) - store.known_tokens(engine.model, alone.ids)
    return missing * bytes_per_token(engine.model)


def encode_each(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
) -> Iterator[Prompt]:
    """Each document of messages in a prompt of its own (`ragkv.prompt.each_alone`), up to the end of its text.

    Its only span is that of the text.
    """
    for alone in each_alone(messages):
        prompt = encode_chat(tokenizer, alone, tools)
        text = next(span for span in prompt.spans if span.kind == "document")
        yield Prompt(prompt.ids[: text.end], (text,))


def reader(
    engine: Engine,
    whole: Prompt,
    messages: Sequence[Message],
    blocks: DocumentBlocks,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    policy: Policy | None = None,
) -> Read:
    """What `Engine.stream` takes to read a prompt by `prefill_documents`.

    Args:
        whole: `messages` and `tools`, encoded.
    """

    def read(on_layer: LayerCallback) -> Prefilled:
        alone = list(encode_each(engine.tokenizer, messages, tools))
        return prefill_documents(engine, whole, alone, blocks, policy=policy, on_layer=on_layer)

    return read


def prefill_documents(
    engine: Engine,
    whole: Prompt,
    alone: Sequence[Prompt],
    blocks: DocumentBlocks = DocumentBlocks(),
    *,
    policy: Policy | None = None,
    on_layer: LayerCallback | None = None,
) -> Prefilled:
    """Read a question about documents, on their stored K/V as far as `blocks` says. Those not stored are read first.

    What blocks do not fit reads the prompt as usual: models with sliding windows or a rotation that ragkv does not
    know, prompts beyond the original length of a rotation that depends on length, and policies that need all queries;
    so does, with a warning, a store that has no room for a document.

    Args:
        whole: the question and all documents.
        alone: its documents, from `encode_each` of the same messages.
        on_layer: told of the progress of each forward pass; an exception it raises ends the reading.

    Raises:
        ConfigError: the engine has no store, or `alone` is from other messages.
    """
    model, policy = engine.model, policy or engine.policy
    rotations = rotations_of(model)
    stored = _all_stored(engine, whole, alone, on_layer) if _fit(model, whole, policy) else []
    if rotations is None or not stored:
        size = engine.prefill_chunk_size
        return prefill(model, whole, policy, chunk_size=size, on_layer=on_layer, store=engine.store)
    texts = [span for span in whole.spans if span.kind == "document"]
    # The first document stands where it was read, and all before it, too, so nothing of it is approximate.
    headers = [(0, texts[0].start), *((before.end, text.start) for before, text in pairwise(texts))]
    pieces = [
        each.piece(text, min(each.start, end - start))
        for each, text, (start, end) in zip(stored, texts, headers, strict=True)
    ]
    begun = [
        (start, min(text.end, text.start + blocks.first_tokens))
        for (start, _), text in zip(headers[1:], texts[1:], strict=True)
    ]
    inside = [(text.start, text.end) for text in texts[1:]]
    count = blocks.voted_tokens(sum(end - start for start, end in inside))
    read = read_on_pieces(model, whole, policy, pieces, rotations, begun, inside, count, on_layer)
    read.cache_creation_tokens = sum(each.computed for each in stored)
    return read


def _fit(model: PreTrainedModel, whole: Prompt, policy: Policy) -> bool:
    """Whether a prompt can be read on blocks."""
    needed = tokens_to_read(policy, len(whole), whole.question_tokens)
    return rotations_of(model) is not None and rope_regime(model, len(whole)) == 0 and needed < len(whole)


@dataclass(frozen=True)
class _Stored:
    """What a store has of a document.

    Attributes:
        alone: the prompt of the document alone, up to the end of its text.
        prefix: what there is of it: all, unless the store took no more.
        computed: tokens that had to be read now.
    """

    alone: Prompt
    prefix: Prefix
    computed: int

    @property
    def complete(self) -> bool:
        return self.prefix.length == len(self.alone)

    @property
    def start(self) -> int:
        """Of the text in the prompt."""
        return self.alone.spans[-1].start

    def piece(self, text: Span, before: int) -> Piece:
        """The text for its place in another prompt, and in place of what stands before it there what does so here.

        Args:
            before: so many tokens of that. Before the first document both prompts are the same; before any other stands
                a header with another number, which is good enough for votes.
        """
        length = self.prefix.length - self.start + before
        return Piece(self.prefix.blocks, self.start - before, text.start - before, length)


def _all_stored(
    engine: Engine, whole: Prompt, alone: Sequence[Prompt], on_layer: LayerCallback | None
) -> list[_Stored]:
    """What the store has of all documents; nothing, with a warning, if it has no room for one of them."""
    if alone and whole.ids[: len(alone[0])] != alone[0].ids:
        raise ConfigError("the first document does not stand where it was read: encode both from the same messages")
    stored: list[_Stored] = []
    for each in alone:
        stored.append(_stored(engine, each, on_layer))
        if not stored[-1].complete:
            warnings.warn(
                f"the store has no room for a document of {len(each)} tokens, so the prompt is read as a whole: raise "
                "its bounds, or see why its folder cannot be written",
                stacklevel=4,
            )
            return []
    _store_of(engine).used([(each.alone.ids, each.prefix) for each in stored if not each.computed])
    return stored


def _stored(engine: Engine, alone: Prompt, on_layer: LayerCallback | None = None) -> _Stored:
    store, ids = _store_of(engine), alone.ids
    if rope_regime(engine.model, len(ids)) != 0:
        raise ConfigError(
            f"a document of {len(ids)} tokens is longer than the {rope_original_length(engine.model)} up to which "
            f"{engine.loaded.name} rotates all prompts alike: cut it into passages"
        )
    prefix = store.longest_prefix(engine.model, ids)
    if prefix.length == len(ids):
        return _Stored(alone, prefix, 0)
    read = prefill(engine.model, Prompt(ids), FullKV(), on_layer=on_layer, store=store)
    return _Stored(alone, store.longest_prefix(engine.model, ids), read.length - read.cache_read_tokens)


def _check_movable(engine: Engine) -> None:
    if rotations_of(engine.model) is None:
        raise ConfigError(
            f"the K/V of single documents cannot be joined for {engine.loaded.name}: a layer has a sliding window, or "
            "a rotation that ragkv does not know; its prompts are read as a whole"
        )


def _store_of(engine: Engine) -> KVStore:
    if engine.store is None:
        raise ConfigError("document blocks live in a store: give the engine one, as in Engine(loaded, store=KVStore())")
    return engine.store.with_tails()


def _prompts(engine: Engine, documents: Sequence[Document], prompt: CitePrompt) -> Iterator[Prompt]:
    return encode_each(engine.tokenizer, prompt.messages("?", documents))
