"""The order of the steps, and nothing else: prompt, prefill with compression, decode, text.

In: prompts (token ids with marked spans). Out: text as it is made, then one completion per prompt with its statistics.
An engine holds no state between requests; threads may share one.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from ragkv.backend import rope_depends_on_length
from ragkv.cache import joinable
from ragkv.chat import Prompt
from ragkv.config import SamplingParams
from ragkv.decode import Decoder
from ragkv.detokenize import TextStream
from ragkv.errors import Cancelled, ConfigError, PromptTooLong
from ragkv.kv_store import KVStore
from ragkv.models import LoadedModel, load
from ragkv.policies import Policy, SnapKV, StreamingLLM
from ragkv.prefill import LayerCallback, Prefilled, prefill
from ragkv.progress import Progress
from ragkv.sampling import Constraint, Sampler

if TYPE_CHECKING:
    from ragkv.streaming.session import Session

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Stats:
    """What a reply cost.

    Attributes:
        prompt_tokens, completion_tokens: tokens read and written; the end-of-sequence token counts as written.
        ttft_s: seconds from the call to this reply's first token.
        decode_tokens_per_s: after the first token; 0 if there was only one.
        kv_bytes_full, kv_bytes_kept: bytes of the prompt's K/V before and after compression.
        kept_tokens: entries kept per KV head of a full-attention layer.
        window_size: length of the observation window.
        unprotected_tokens: tokens of instructions or document headers that the budget had no room to protect.
        cache_read_tokens, cache_creation_tokens: tokens of the prompt whose K/V the store had, and those it got.
    """

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    decode_tokens_per_s: float
    kv_bytes_full: int
    kv_bytes_kept: int
    kept_tokens: int
    window_size: int
    unprotected_tokens: int
    cache_read_tokens: int = 0
    cache_creation_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """A whole reply. `tokens` are all that were generated; `text` ends before a stop string or control token."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats


@dataclass(frozen=True)
class Chunk:
    """A step of the reply to prompt number `row`: its new text, and the completion once the reply has ended."""

    row: int
    text: str
    completion: Completion | None = None


class Engine:
    """A loaded model that answers prompts on a compressed KV cache.

    Args:
        loaded: the model and its tokenizer.
        policy: what is kept of each prompt's K/V, unless a call says otherwise.
        prefill_chunk_size: tokens per forward pass of a prefill; None reads every prompt in one pass.
        store: where K/V outlive their question, so that prompts which begin alike are read once; None for nowhere.

    Raises:
        ModelError: the architecture cannot be served.
        ConfigError: the model's rotation depends on the prompt's length, which forbids chunks.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: Policy | None = None,
        *,
        prefill_chunk_size: int | None = None,
        store: KVStore | None = None,
    ) -> None:
        if prefill_chunk_size is not None and prefill_chunk_size < 1:
            raise ConfigError(f"prefill_chunk_size={prefill_chunk_size}: must be at least 1, or None for one pass")
        if prefill_chunk_size is not None and rope_depends_on_length(loaded.model):
            raise ConfigError(
                f"prefill_chunk_size={prefill_chunk_size}: {loaded.name} rotates a token by the length of the whole "
                "prompt; leave it at None to read prompts in one pass"
            )
        self.loaded = loaded
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.policy = SnapKV() if policy is None else policy
        self.prefill_chunk_size, self.store = prefill_chunk_size, store

    @classmethod
    def load(
        cls,
        model: str,
        policy: Policy | None = None,
        *,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
        prefill_chunk_size: int | None = None,
        store: KVStore | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Load a model by packaged name, hub id, folder or `.gguf` file; see `ragkv.models.load`."""
        loaded = load(model, device=device, dtype=dtype, attn_implementation=attn_implementation, progress=progress)
        return cls(loaded, policy, prefill_chunk_size=prefill_chunk_size, store=store)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        policy: Policy | None = None,
    ) -> list[Completion]:
        """Answer several prompts of any lengths as one batch; the replies equal those of single calls."""
        if not prompts:
            return []
        chunks = self.stream(prompts, sampling, policy=policy)
        done = {chunk.row: chunk.completion for chunk in chunks if chunk.completion is not None}
        return [done[row] for row in range(len(prompts))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        policy: Policy | None = None,
        constraints: Sequence[Constraint | None] | None = None,
        on_layer: LayerCallback | None = None,
        on_prefilled: Callable[[int, Prefilled], None] | None = None,
        read: Callable[[Prompt], Prefilled] | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Chunk]:
        """Generate, yielding text as it is made. Closing the iterator stops between two tokens.

        Args:
            prompts: one prompt or a batch; each is read on its own, without padding, and all are decoded together.
            sampling: for all prompts, or one for each.
            policy: for this call instead of the engine's own.
            constraints: grammars that the replies must follow, one entry per prompt.
            on_layer: told of the progress of each prefill.
            read: reads the prompts in another way than `ragkv.prefill.prefill`, such as on blocks of documents.
            on_prefilled: shown each row's number and its prompt as read and compressed, before decoding changes it.
            cancel: when set, every unfinished reply ends with finish_reason "cancelled" before its next token.

        Raises:
            PromptTooLong: a prompt and its `max_tokens` do not fit into the model's context.
            Cancelled: `cancel` was set while a prompt was still being read, so that there is no reply to end.
        """
        prompts = [prompts] if isinstance(prompts, Prompt) else list(prompts)
        options = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        for prompt, option in zip(prompts, options, strict=True):
            self._check_length(prompt, option)
        replies = [
            _Reply(row, self, prompt, option, constraint)
            for row, (prompt, option, constraint) in enumerate(
                zip(prompts, options, constraints or [None] * len(prompts), strict=True)
            )
        ]
        return self._run(replies, policy or self.policy, on_layer, on_prefilled, read, cancel or threading.Event())

    def reply(
        self,
        prompt: Prompt,
        prefilled: Prefilled,
        sampling: SamplingParams = SamplingParams(),
        *,
        constraint: Constraint | None = None,
    ) -> Completion:
        """Answer a prompt that has been read, as by `ragkv.compare.prefill_many`; what was read is used up.

        The first token is there at once, so `ttft_s` says nothing about the prompt.

        Raises:
            PromptTooLong: the prompt and `max_tokens` do not fit into the model's context.
        """
        self._check_length(prompt, sampling)
        reply = _Reply(0, self, prompt, sampling, constraint)
        reply.prefilled = prefilled
        chunks = self._decode([reply], threading.Event(), time.perf_counter())
        return next(chunk.completion for chunk in chunks if chunk.completion is not None)

    def session(self, policy: StreamingLLM | None = None, **options: Any) -> "Session":
        """A conversation or stream of text that never fills up; see `ragkv.streaming.session.Session` for options.

        Args:
            policy: sinks and recent tokens, together the size of the session's cache; by default 4 and 4092, or as many
                as the model's context has.

        Raises:
            ModelError: the model cannot stream.
            ConfigError: the policy keeps more than the model sees, or an option is out of its bounds.
        """
        from ragkv.streaming.session import Session, layout_for

        most = self.loaded.context_length - StreamingLLM.num_sink_tokens
        chosen = policy or StreamingLLM(window_length=min(StreamingLLM.window_length, most))
        return Session(self, layout_for(self, chosen), **options)

    def _check_length(self, prompt: Prompt, sampling: SamplingParams) -> None:
        context = self.loaded.context_length
        if not len(prompt):
            raise ConfigError("the prompt is empty: it needs at least one token")
        if len(prompt) + sampling.max_tokens > context:
            raise PromptTooLong(
                f"a prompt of {len(prompt)} tokens and max_tokens={sampling.max_tokens} do not fit into the "
                f"{context} tokens of context of {self.loaded.name}: give fewer documents or lower max_tokens"
            )

    def _run(
        self,
        replies: list["_Reply"],
        policy: Policy,
        on_layer: LayerCallback | None,
        on_prefilled: Callable[[int, Prefilled], None] | None,
        read: Callable[[Prompt], Prefilled] | None,
        cancel: threading.Event,
    ) -> Iterator[Chunk]:
        def watch(done: int, total: int) -> None:
            if cancel.is_set():
                raise Cancelled("the generation was cancelled while its prompt was being read")
            if on_layer is not None:
                on_layer(done, total)

        def prefill_as_usual(prompt: Prompt) -> Prefilled:
            size, store = self.prefill_chunk_size, self.store
            return prefill(self.model, prompt, policy, chunk_size=size, on_layer=watch, store=store)

        started = time.perf_counter()
        for reply in replies:
            reply.prefilled = (read or prefill_as_usual)(reply.prompt)
            if on_prefilled is not None:
                on_prefilled(reply.row, reply.prefilled)
        # A rotation that depends on length would be that of the longest row for all.
        apart = rope_depends_on_length(self.model) or not joinable([reply.prefilled.cache for reply in replies])
        batches = [[reply] for reply in replies] if apart else [replies]
        for batch in batches:
            yield from self._decode(batch, cancel, started)

    def _decode(self, running: list["_Reply"], cancel: threading.Event, started: float) -> Iterator[Chunk]:
        decoder = Decoder(self.model, [reply.prefilled for reply in running])
        while running:
            if cancel.is_set():
                yield from (reply.end("cancelled", started) for reply in running)
                return
            for reply, logits in zip(running, decoder.logits, strict=True):
                yield reply.push(reply.sampler(logits), started)
            going_on = [row for row, reply in enumerate(running) if reply.finish_reason is None]
            if going_on and len(going_on) < len(running):
                decoder.keep_rows(going_on)
            running = [running[row] for row in going_on]
            if running:
                decoder.step([reply.tokens[-1] for reply in running])


class _Reply:
    """One reply while it is being made."""

    prefilled: Prefilled

    def __init__(
        self,
        row: int,
        engine: Engine,
        prompt: Prompt,
        sampling: SamplingParams,
        constraint: Constraint | None,
    ) -> None:
        self.row, self.prompt = row, prompt
        self.sampler = Sampler(sampling, prompt.ids, constraint)
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._text = TextStream(engine.tokenizer, sampling.stop, strip_start=prompt.begun)
        self._max_tokens, self._eos = sampling.max_tokens, engine.loaded.eos_token_ids
        self._first_token_at = self._last_token_at = 0.0

    def push(self, token: int, started: float) -> Chunk:
        """Take the next token; the chunk carries the completion if it is the last one."""
        self._last_token_at = time.perf_counter()
        self._first_token_at = self._first_token_at or self._last_token_at
        self.tokens.append(token)
        text = "" if token in self._eos else self._text.push(token)
        if token in self._eos or self._text.stopped:
            return self.end("stop", started, text)
        if len(self.tokens) == self._max_tokens:
            return self.end("length", started, text)
        return Chunk(self.row, text)

    def end(self, reason: FinishReason, started: float, text: str = "") -> Chunk:
        """Show what was held back and sum up. A stop string that only the end reveals counts as one."""
        text += self._text.finish()
        self.finish_reason = "stop" if self._text.stopped else reason
        return Chunk(
            self.row,
            text,
            Completion(self._text.text, tuple(self.tokens), self.finish_reason, self._stats(started)),
        )

    def _stats(self, started: float) -> Stats:
        decoding = self._last_token_at - self._first_token_at
        return Stats(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.tokens),
            ttft_s=max(0.0, self._first_token_at - started),
            decode_tokens_per_s=(len(self.tokens) - 1) / decoding if decoding else 0.0,
            kv_bytes_full=self.prefilled.kv_bytes_full,
            kv_bytes_kept=self.prefilled.kv_bytes_kept,
            kept_tokens=self.prefilled.kept_tokens,
            window_size=self.prefilled.window_size,
            unprotected_tokens=self.prefilled.unprotected_tokens,
            cache_read_tokens=self.prefilled.cache_read_tokens,
            cache_creation_tokens=self.prefilled.cache_creation_tokens,
        )
