"""Who answers an example: something that gives one outcome for each policy. The real one reads every prompt once."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ragkv import peak_memory
from ragkv.chat import Prompt
from ragkv.cite_grammar import citation_constraint
from ragkv.compare import prefill_many
from ragkv.config import SamplingParams
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.errors import PromptTooLong, RagkvError
from ragkv.policies import FullKV, Policy
from ragkv.prefill import Prefilled
from ragkv.reply import Completion
from ragkv.sampling import Constraint
from ragkv.survival import kept_masks, survival
from ragkv_evals.gold_tokens import answer_ranges, document_ranges, gold_ranges, shaded, shares
from ragkv_evals.probe import Probe, probe
from ragkv_evals.prompts import PromptCounter, encode
from ragkv_evals.records import Outcome
from ragkv_evals.shared_h2o import SharedH2O
from ragkv_evals.tasks.base import Counter, Example
from ragkv_evals.truncation import kept_mask, truncated
from ragkv_evals.variants import Truncation, variant

MOST_SHADED = 4  # gold documents whose text a record shows


class PolicyFailure(RagkvError):
    """A policy kept something else than its budget."""


class Answerer(Protocol):
    """Answers examples, and counts tokens as its prompts have them."""

    counter: Counter

    def answer(self, example: Example, names: Sequence[str], max_tokens: int) -> Iterator[Outcome]:
        """One outcome for each of these policies, as they are done."""

    def probe(self, example: Example) -> Probe:
        """How long a short piece of its prompt takes to read."""


@dataclass(frozen=True)
class _Read:
    """An example's prompt as read under one policy.

    Attributes:
        documents: those that were read.
        prompt: what was read.
        whole: the prompt with all documents, even if fewer were read.
        masks: what is left of it, as from `ragkv.survival.kept_masks`.
        budget: what should be left per KV head, averaged over layers.
        ttft_s: of the prefill, which other policies may share; None if an earlier one had read its beginning.
    """

    policy: str
    documents: Sequence[Document]
    prompt: Prompt
    whole: Prompt
    prefilled: Prefilled
    masks: Sequence[Tensor]
    budget: float
    ttft_s: float | None


class EngineAnswerer:
    """Reads each prompt once and decodes greedily from the cache of every policy.

    Args:
        together: decode from all caches of a prompt as one batch instead of one after the other.
        must_cite: hold replies to the form of the citing prompt.
    """

    def __init__(self, engine: Engine, together: bool = False, must_cite: bool = False) -> None:
        self._engine, self._device = engine, engine.model.device
        self._together, self._must_cite = together, must_cite
        self._h2o = SharedH2O()
        self.counter: Counter = PromptCounter(engine.tokenizer)

    def answer(self, example: Example, names: Sequence[str], max_tokens: int) -> Iterator[Outcome]:
        """First the outcomes of KV policies, which share a prefill, then those of truncations."""
        whole = encode(self._engine.tokenizer, example)
        self._check_length(example, whole, max_tokens)
        variants = {name: variant(name) for name in names}
        policies = {name: policy for name, policy in variants.items() if not isinstance(policy, Truncation)}
        reads = self._compressed(example, whole, policies)
        for batch in [reads] if self._together else [[read] for read in reads]:
            yield from self._outcomes(example, batch, max_tokens)
        for name, shorter in variants.items():
            if isinstance(shorter, Truncation):
                yield from self._outcomes(example, [self._truncated(example, whole, name, shorter)], max_tokens)

    def probe(self, example: Example) -> Probe:
        return probe(self._engine, encode(self._engine.tokenizer, example))

    def _check_length(self, example: Example, prompt: Prompt, max_tokens: int) -> None:
        context = self._engine.loaded.context_length
        if len(prompt) + max_tokens > context:
            raise PromptTooLong(
                f"example {example.id}: {len(prompt)} tokens and {max_tokens} of the reply do not fit into the "
                f"{context} tokens of context of {self._engine.loaded.name}: lower --context-tokens or --max-tokens"
            )

    def _compressed(self, example: Example, whole: Prompt, policies: Mapping[str, Policy]) -> list[_Read]:
        if not policies:
            return []
        read, ttft_s = self._prefill(whole, list(policies.values()))
        found = []
        for (name, policy), prefilled in zip(policies.items(), read, strict=True):
            masks = kept_masks(prefilled.cache, len(whole))
            budget = check_kept(name, policy, masks)
            found.append(_Read(name, example.documents, whole, whole, prefilled, masks, budget, ttft_s))
        return found

    def _truncated(self, example: Example, whole: Prompt, name: str, shorter: Truncation) -> _Read:
        left = truncated(example, shorter.max_prompt, self.counter)
        prompt = encode(self._engine.tokenizer, left)
        (prefilled,), ttft_s = self._prefill(prompt, [FullKV()])
        masks = [kept_mask(whole, len(left.documents))]
        return _Read(name, left.documents, prompt, whole, prefilled, masks, len(prompt), ttft_s)

    def _prefill(self, prompt: Prompt, policies: Sequence[Policy]) -> tuple[list[Prefilled], float | None]:
        """One cache for each policy, and the seconds until the first token is known, if the whole prompt was read."""
        if self._engine.store is not None:
            policies = [self._h2o.policy_for(policy, prompt) for policy in policies]
        peak_memory.reset(self._device)
        started = time.perf_counter()
        read = prefill_many(self._engine.model, prompt, policies, store=self._engine.store)
        read[0].logits.argmax().item()  # waits for a GPU
        seconds = time.perf_counter() - started
        return read, None if read[0].cache_read_tokens else seconds

    def _outcomes(self, example: Example, batch: Sequence[_Read], max_tokens: int) -> Iterator[Outcome]:
        """Of replies that are decoded as one batch; the caches are let go."""
        if not batch:
            return
        replies = self._engine.replies(
            [(read.prompt, read.prefilled) for read in batch],
            SamplingParams(max_tokens=max_tokens),
            constraints=[self._constraint(read.documents) for read in batch],
        )
        for read, done in zip(batch, replies, strict=True):
            read.prefilled.cache.layers.clear()
            yield self._outcome(example, read, done, done.stats.decode_tokens_per_s if len(batch) == 1 else None)

    def _constraint(self, documents: Sequence[Document]) -> Constraint | None:
        if not self._must_cite or not documents:
            return None
        eos = self._engine.loaded.eos_token_ids
        return citation_constraint(self._engine.tokenizer, documents, eos_token_ids=eos)

    def _outcome(self, example: Example, read: _Read, done: Completion, decode_tokens_per_s: float | None) -> Outcome:
        gold = gold_ranges(read.whole, example)
        answers = answer_ranges(self._engine.tokenizer, read.whole, example)
        documents = document_ranges(read.whole).values()
        return Outcome(
            policy=read.policy,
            reply=done.text.strip(),
            finish_reason=done.finish_reason,
            prompt_tokens=read.prefilled.length,
            completion_tokens=done.stats.completion_tokens,
            budget=read.budget,
            kept_tokens=kept_per_head(read.masks),
            gold_survival=survival(read.masks, gold).mean_share if gold else None,
            answer_survival=survival(read.masks, answers).mean_share if answers else None,
            documents_kept=shares(read.masks, documents),
            gold_kept=shaded(self._engine.tokenizer, read.whole, read.masks, gold[:MOST_SHADED]),
            unprotected_tokens=read.prefilled.unprotected_tokens,
            ttft_s=read.ttft_s,
            decode_tokens_per_s=decode_tokens_per_s,
            kv_bytes_full=read.prefilled.kv_bytes_full,
            kv_bytes_kept=read.prefilled.kv_bytes_kept,
            peak_memory_bytes=peak_memory.peak(self._device),
        )


def kept_per_head(masks: Sequence[Tensor]) -> float:
    """Entries kept per KV head, averaged over heads and layers."""
    return sum(float(mask.sum()) for mask in masks) / sum(mask.shape[0] for mask in masks)


def check_kept(name: str, policy: Policy, masks: Sequence[Tensor]) -> float:
    """The budget per KV head averaged over layers, after making sure that every layer kept exactly its own.

    Raises:
        PolicyFailure: a layer kept more or less.
    """
    budgets = [policy.budget(mask.shape[1], layer, len(masks)) for layer, mask in enumerate(masks)]
    for layer, (mask, budget) in enumerate(zip(masks, budgets, strict=True)):
        heads, length = mask.shape
        if int(mask.sum()) != heads * budget:
            raise PolicyFailure(
                f"{name} kept {int(mask.sum()) / heads:g} of {length} tokens per KV head in layer {layer}, "
                f"but its budget is {budget}"
            )
    return sum(budgets) / len(budgets)
